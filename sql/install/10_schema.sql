-- The script makes the schema itself and never uses IF NOT EXISTS or OR REPLACE:
-- anything planted before CREATE EXTENSION makes it fail (CVE-2022-2625).
SET LOCAL search_path TO pg_catalog, pg_temp;
CREATE SCHEMA awa;
