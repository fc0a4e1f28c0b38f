-- What clients of awa 0.6 expect to find, so that they produce and read here as they are
-- (docs/clients.md). Views hold nothing; the functions that have nothing to do do nothing.

CREATE FUNCTION awa.insert_job_compat(
    p_kind text, p_queue text DEFAULT 'default', p_args jsonb DEFAULT '{}',
    p_state awa.job_state DEFAULT 'available', p_priority smallint DEFAULT 2,
    p_max_attempts smallint DEFAULT 25, p_run_at timestamptz DEFAULT NULL,
    p_metadata jsonb DEFAULT '{}', p_tags text[] DEFAULT '{}',
    p_unique_key bytea DEFAULT NULL, p_unique_states bit DEFAULT NULL,
    p_ordering_key bytea DEFAULT NULL)
RETURNS awa.jobs LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_insert_job_compat';
COMMENT ON FUNCTION awa.insert_job_compat IS 'Enqueues one job and returns its row';

-- Writing to the view of jobs: INSERT enqueues, DELETE is delete_job, UPDATE is refused,
-- also where no row is met.
CREATE FUNCTION awa.write_jobs_view()
RETURNS trigger LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_write_jobs_view';
CREATE TRIGGER write_jobs_view INSTEAD OF INSERT OR UPDATE OR DELETE ON awa.jobs
    FOR EACH ROW EXECUTE FUNCTION awa.write_jobs_view();
CREATE TRIGGER refuse_update BEFORE UPDATE ON awa.jobs
    FOR EACH STATEMENT EXECUTE FUNCTION awa.write_jobs_view();

-- Clients of 0.6 look for jobs in two tables.
CREATE VIEW awa.jobs_hot WITH (security_barrier) AS
    SELECT id, kind, queue, args, state, priority, attempt, max_attempts, run_at, heartbeat_at,
           deadline_at, attempted_at, finalized_at, created_at, errors, metadata, tags,
           unique_key, unique_states, callback_id, callback_timeout_at, callback_filter,
           callback_on_complete, callback_on_fail, callback_transform, run_lease, progress
    FROM awa.jobs
    WHERE state NOT IN ('scheduled', 'retryable');

CREATE VIEW awa.scheduled_jobs WITH (security_barrier) AS
    SELECT id, kind, queue, args, state, priority, attempt, max_attempts, run_at, heartbeat_at,
           deadline_at, attempted_at, finalized_at, created_at, errors, metadata, tags,
           unique_key, unique_states, callback_id, callback_timeout_at, callback_filter,
           callback_on_complete, callback_on_fail, callback_transform, run_lease, progress
    FROM awa.jobs
    WHERE state IN ('scheduled', 'retryable');

-- Of completed jobs there are as many as were ever completed, of failed and cancelled ones as
-- many as are still there.
CREATE VIEW awa.queue_state_counts WITH (security_barrier) AS
    SELECT s.queue, s.scheduled, s.available, s.running, s.completed_total AS completed,
           s.retryable, coalesce(d.failed, 0) + s.dlq AS failed,
           coalesce(d.cancelled, 0) AS cancelled, s.waiting_external
    FROM awa.queue_stats s
    LEFT JOIN (
        SELECT queue, count(*) FILTER (WHERE state = 'failed') AS failed,
               count(*) FILTER (WHERE state = 'cancelled') AS cancelled
        FROM awa.done_entries GROUP BY queue
    ) d ON d.queue = s.queue;

-- Pauses. What is written here goes to pause_queue or resume_queue: the row trigger passes it
-- on and lets no row of its own through.

CREATE VIEW awa.queue_meta WITH (security_barrier) AS
    SELECT p.queue, p.paused, p.paused_at, p.paused_by,
           coalesce((SELECT (q.settings ->> 'enqueue_shards')::smallint
                     FROM awa.queues q WHERE q.queue = p.queue), 1::smallint) AS enqueue_shards
    FROM awa.queue_pauses p
    WHERE awa.may_read(p.queue);

CREATE FUNCTION awa.write_queue_meta()
RETURNS trigger LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_write_queue_meta';
CREATE TRIGGER write_queue_meta BEFORE INSERT OR UPDATE OR DELETE ON awa.queue_pauses
    FOR EACH ROW EXECUTE FUNCTION awa.write_queue_meta();
ALTER TABLE awa.queue_pauses ENABLE ALWAYS TRIGGER write_queue_meta;

CREATE FUNCTION awa.show_pause()
RETURNS trigger LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_show_pause';
CREATE TRIGGER show_first_pause AFTER INSERT ON awa.queues
    FOR EACH ROW WHEN (NEW.paused_at IS NOT NULL) EXECUTE FUNCTION awa.show_pause();
ALTER TABLE awa.queues ENABLE ALWAYS TRIGGER show_first_pause;
CREATE TRIGGER show_pause AFTER UPDATE OF paused_at ON awa.queues
    FOR EACH ROW EXECUTE FUNCTION awa.show_pause();
ALTER TABLE awa.queues ENABLE ALWAYS TRIGGER show_pause;

-- Descriptors as clients know them; the tables are not for them.
CREATE VIEW awa.queue_descriptors WITH (security_barrier) AS
    SELECT queue, display_name, description, owner, docs_url, tags, extra, descriptor_hash,
           sync_interval_ms, created_at, updated_at, last_seen_at
    FROM awa.queue_descriptor_status;

CREATE VIEW awa.job_kind_descriptors WITH (security_barrier) AS
    SELECT kind, display_name, description, owner, docs_url, tags, extra, descriptor_hash,
           sync_interval_ms, created_at, updated_at, last_seen_at
    FROM awa.job_kind_descriptor_status;

-- Which schema this is, as far as a client's migrate() is concerned: there is nothing to do.
CREATE VIEW awa.schema_version WITH (security_barrier) AS
    SELECT version, 'extension awa'::text AS description, NULL::timestamptz AS applied_at
    FROM generate_series(1, 40) AS version;

CREATE FUNCTION awa.storage_status()
RETURNS TABLE (
    current_engine text, active_engine text, prepared_engine text, state text,
    transition_epoch bigint, details jsonb, entered_at timestamptz, updated_at timestamptz,
    finalized_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_storage_status';
COMMENT ON FUNCTION awa.storage_status IS 'Tells clients of awa 0.6 that there is nothing to migrate';

-- Where there is none, a client reads awa.jobs and not the other system's own storage.
CREATE VIEW awa.runtime_storage_backends WITH (security_barrier) AS
    SELECT NULL::text AS backend, NULL::text AS schema_name, NULL::timestamptz AS updated_at
    WHERE false;

-- Counts are kept in memory, so nothing marks them as old and there is nothing to refresh. A
-- client knows these functions from older ones by the word admin_dirty_queue_marks in their
-- source, which of a C function is the name of its symbol; otherwise migrate() replaces them.
CREATE VIEW awa.admin_dirty_queue_marks WITH (security_barrier) AS
    SELECT NULL::text AS queue, NULL::timestamptz AS touched_at WHERE false;
CREATE VIEW awa.admin_dirty_kind_marks WITH (security_barrier) AS
    SELECT NULL::text AS kind, NULL::timestamptz AS touched_at WHERE false;
CREATE FUNCTION awa.mark_dirty_keys_insert()
RETURNS trigger LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_admin_dirty_queue_marks';
CREATE FUNCTION awa.mark_dirty_keys_update()
RETURNS trigger LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_admin_dirty_queue_marks';
CREATE FUNCTION awa.mark_dirty_keys_delete()
RETURNS trigger LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_admin_dirty_queue_marks';
CREATE FUNCTION awa.recompute_dirty_admin_metadata(p_batch_size int DEFAULT 100)
RETURNS int LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_admin_dirty_queue_marks';
CREATE FUNCTION awa.refresh_admin_metadata()
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_admin_dirty_queue_marks';
