-- The script makes the schema itself and never uses IF NOT EXISTS or OR REPLACE:
-- anything planted before CREATE EXTENSION makes it fail (CVE-2022-2625).
SET LOCAL search_path TO pg_catalog, pg_temp;
-- Direct access is written for the heap.
SET LOCAL default_table_access_method = heap;
CREATE SCHEMA awa;

-- Fails with 55000 and a hint where the library was not preloaded: there would be no
-- shared memory to hold the queues.
CREATE FUNCTION awa.require_preload() RETURNS void
    LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_require_preload';
SELECT awa.require_preload();
DROP FUNCTION awa.require_preload();
