-- The functions of the contract. Each is written in Rust (src/api) and checks the access
-- of its caller itself; nothing here is executable by PUBLIC (see 90_access.sql).

-- Produce

CREATE FUNCTION awa.insert_job(
    kind text, args jsonb DEFAULT '{}', queue text DEFAULT 'default',
    priority int DEFAULT NULL, run_at timestamptz DEFAULT NULL, max_attempts int DEFAULT NULL,
    tags text[] DEFAULT NULL, metadata jsonb DEFAULT NULL, unique_key text DEFAULT NULL,
    opts jsonb DEFAULT '{}')
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_insert_job';
COMMENT ON FUNCTION awa.insert_job IS 'Enqueues one job and returns its id';

CREATE FUNCTION awa.insert_jobs(jobs jsonb, opts jsonb DEFAULT '{}')
RETURNS TABLE (ord bigint, job_id bigint, duplicate boolean)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_insert_jobs';
COMMENT ON FUNCTION awa.insert_jobs IS 'Enqueues an array of jobs, all or none';

CREATE FUNCTION awa.insert_jobs_compat_batch(
    kinds text[], queues text[], args jsonb[], states awa.job_state[] DEFAULT NULL,
    priorities smallint[] DEFAULT NULL, max_attempts smallint[] DEFAULT NULL,
    run_ats timestamptz[] DEFAULT NULL, metadata jsonb[] DEFAULT NULL,
    tags jsonb[] DEFAULT NULL, unique_keys bytea[] DEFAULT NULL,
    unique_states bit(8)[] DEFAULT NULL, ordering_keys bytea[] DEFAULT NULL,
    skip_unique_conflicts boolean DEFAULT false)
RETURNS TABLE (ord bigint, job_id bigint, duplicate boolean)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_insert_jobs_compat_batch';
COMMENT ON FUNCTION awa.insert_jobs_compat_batch IS 'Enqueues jobs given as columns, all or none';

-- Work

CREATE FUNCTION awa.register_runtime(
    name text DEFAULT NULL, liveness text DEFAULT 'session',
    heartbeat_timeout interval DEFAULT NULL, opts jsonb DEFAULT '{}')
RETURNS uuid LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_register_runtime';

CREATE FUNCTION awa.heartbeat(runtime uuid, holding bigint[] DEFAULT NULL)
RETURNS TABLE (receipt bigint, job_id bigint)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_heartbeat';

CREATE FUNCTION awa.deregister_runtime(runtime uuid, release boolean DEFAULT true)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_deregister_runtime';

CREATE FUNCTION awa.claim(
    queue text, max_jobs int DEFAULT 1, runtime uuid DEFAULT NULL,
    deadline interval DEFAULT NULL, wait interval DEFAULT '0', opts jsonb DEFAULT '{}')
RETURNS TABLE (
    receipt bigint, job_id bigint, kind text, queue text, priority smallint, attempt smallint,
    max_attempts smallint, args jsonb, metadata jsonb, tags text[], progress jsonb,
    run_at timestamptz, created_at timestamptz, deadline_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_claim';
COMMENT ON FUNCTION awa.claim IS 'Takes up to max_jobs ready jobs of a queue';

CREATE FUNCTION awa.claim_from(
    queues text[], max_jobs int DEFAULT 1, runtime uuid DEFAULT NULL,
    deadline interval DEFAULT NULL, wait interval DEFAULT '0', opts jsonb DEFAULT '{}')
RETURNS TABLE (
    receipt bigint, job_id bigint, kind text, queue text, priority smallint, attempt smallint,
    max_attempts smallint, args jsonb, metadata jsonb, tags text[], progress jsonb,
    run_at timestamptz, created_at timestamptz, deadline_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_claim_from';
COMMENT ON FUNCTION awa.claim_from IS 'Takes up to max_jobs ready jobs of several queues';

CREATE PROCEDURE awa.wait_for_jobs(
    queues text[], timeout interval, INOUT available boolean DEFAULT NULL)
LANGUAGE c AS 'MODULE_PATHNAME', 'awa_wait_for_jobs';
COMMENT ON PROCEDURE awa.wait_for_jobs IS 'Waits, without a snapshot, until a job is there';

CREATE FUNCTION awa.claim_outcome()
RETURNS text LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_claim_outcome';

CREATE FUNCTION awa.complete(receipt bigint, result jsonb DEFAULT NULL)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_complete';

CREATE FUNCTION awa.complete_many(receipts bigint[])
RETURNS TABLE (receipt bigint, completed boolean)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_complete_many';

CREATE FUNCTION awa.complete_and_claim(
    receipts bigint[], queue text, max_jobs int DEFAULT 1, runtime uuid DEFAULT NULL,
    deadline interval DEFAULT NULL)
RETURNS TABLE (
    receipt bigint, job_id bigint, kind text, queue text, priority smallint, attempt smallint,
    max_attempts smallint, args jsonb, metadata jsonb, tags text[], progress jsonb,
    run_at timestamptz, created_at timestamptz, deadline_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_complete_and_claim';

CREATE FUNCTION awa.fail(
    receipt bigint, error text, retry_after interval DEFAULT NULL,
    terminal boolean DEFAULT false)
RETURNS awa.job_state LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_fail';

CREATE FUNCTION awa.snooze(receipt bigint, delay interval)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_snooze';
COMMENT ON FUNCTION awa.snooze IS 'Schedules the job of an attempt anew; the attempt does not count';

CREATE FUNCTION awa.cancel_attempt(receipt bigint, reason text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_cancel_attempt';
COMMENT ON FUNCTION awa.cancel_attempt IS 'Gives up an attempt and cancels its job';

CREATE FUNCTION awa.release(receipts bigint[])
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_release';

CREATE FUNCTION awa.cancel_requested(receipts bigint[])
RETURNS SETOF bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_cancel_requested';
COMMENT ON FUNCTION awa.cancel_requested IS 'Which of these attempts were asked to stop';

CREATE FUNCTION awa.extend(receipts bigint[], by interval)
RETURNS TABLE (receipt bigint, deadline_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_extend';

CREATE FUNCTION awa.set_progress(
    receipt bigint, percent int DEFAULT NULL, message text DEFAULT NULL,
    metadata jsonb DEFAULT NULL)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_set_progress';
COMMENT ON FUNCTION awa.set_progress IS 'Tells how far an attempt has come';

CREATE FUNCTION awa.register_callback(receipt bigint, timeout interval, opts jsonb DEFAULT '{}')
RETURNS uuid LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_register_callback';
COMMENT ON FUNCTION awa.register_callback IS 'Gives an attempt a token by which others resolve it';

CREATE FUNCTION awa.wait_for_callback(receipt bigint)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_wait_for_callback';
COMMENT ON FUNCTION awa.wait_for_callback IS 'Parks an attempt until its callback is resolved';

CREATE FUNCTION awa.complete_external(callback uuid, payload jsonb DEFAULT NULL)
RETURNS awa.job_state LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_complete_external';
COMMENT ON FUNCTION awa.complete_external IS 'Completes the job of a callback';

CREATE FUNCTION awa.fail_external(callback uuid, error text)
RETURNS awa.job_state LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_fail_external';
COMMENT ON FUNCTION awa.fail_external IS 'Fails the job of a callback for good';

CREATE FUNCTION awa.retry_external(callback uuid)
RETURNS awa.job_state LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_retry_external';
COMMENT ON FUNCTION awa.retry_external IS 'Makes a parked job available again; its attempts start over';

CREATE FUNCTION awa.resume_external(callback uuid, payload jsonb DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_resume_external';
COMMENT ON FUNCTION awa.resume_external IS 'Lets an attempt go on and returns its receipt';

CREATE FUNCTION awa.heartbeat_callback(callback uuid, timeout interval)
RETURNS timestamptz LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_heartbeat_callback';
COMMENT ON FUNCTION awa.heartbeat_callback IS 'Gives the callback of a parked attempt more time';

CREATE FUNCTION awa.cancel_callback(callback uuid)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_cancel_callback';
COMMENT ON FUNCTION awa.cancel_callback IS 'Takes a callback back before its attempt waits for it';

CREATE FUNCTION awa.callback_result(receipt bigint)
RETURNS jsonb LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_callback_result';
COMMENT ON FUNCTION awa.callback_result IS 'What the last callback that was resumed brought';

-- Look

CREATE FUNCTION awa.jobs_rows()
RETURNS TABLE (
    id bigint, kind text, queue text, args jsonb, state awa.job_state, priority smallint,
    attempt smallint, max_attempts smallint, run_at timestamptz, heartbeat_at timestamptz,
    deadline_at timestamptz, attempted_at timestamptz, finalized_at timestamptz,
    created_at timestamptz, errors jsonb[], metadata jsonb, tags text[], unique_key bytea,
    unique_states bit(8), callback_id uuid, callback_timeout_at timestamptz,
    callback_filter text, callback_on_complete text, callback_on_fail text,
    callback_transform text, run_lease bigint, progress jsonb)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_jobs_rows';

CREATE VIEW awa.jobs WITH (security_barrier) AS
    SELECT id, kind, queue, args, state, priority, attempt, max_attempts, run_at, heartbeat_at,
           deadline_at, attempted_at, finalized_at, created_at, errors, metadata, tags,
           unique_key, unique_states, callback_id, callback_timeout_at, callback_filter,
           callback_on_complete, callback_on_fail, callback_transform, run_lease, progress
    FROM awa.jobs_rows();

CREATE FUNCTION awa.get_job(job_id bigint)
RETURNS SETOF awa.jobs LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_get_job';

CREATE VIEW awa.terminal_jobs WITH (security_barrier) AS
    SELECT id, kind, queue, args, state, priority, attempt, max_attempts, run_at, heartbeat_at,
           deadline_at, attempted_at, finalized_at, created_at, errors, metadata, tags,
           unique_key, unique_states, callback_id, callback_timeout_at, callback_filter,
           callback_on_complete, callback_on_fail, callback_transform, run_lease, progress
    FROM awa.jobs
    WHERE state IN ('completed', 'failed', 'cancelled');

CREATE FUNCTION awa.list_jobs(
    queue text DEFAULT NULL, state awa.job_state DEFAULT NULL, kind text DEFAULT NULL,
    tag text DEFAULT NULL, before_id bigint DEFAULT NULL, max_rows int DEFAULT 100)
RETURNS SETOF awa.jobs LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_list_jobs';
COMMENT ON FUNCTION awa.list_jobs IS 'The newest jobs, filtered; page with before_id';

CREATE FUNCTION awa.job_attempts(job_id bigint)
RETURNS TABLE (
    attempt int, receipt bigint, runtime uuid, claimed_at timestamptz, closed_at timestamptz,
    outcome text, error text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_job_attempts';
COMMENT ON FUNCTION awa.job_attempts IS 'The attempts of a job, oldest first';

CREATE FUNCTION awa.dump_job(job_id bigint)
RETURNS jsonb LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_dump_job';
COMMENT ON FUNCTION awa.dump_job IS 'All there is to know about a job, as one document';

CREATE FUNCTION awa.get_result(job_id bigint, wait interval DEFAULT '0')
RETURNS jsonb LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_get_result';
COMMENT ON FUNCTION awa.get_result IS 'The result of a completed job; waits for its end if asked';

CREATE FUNCTION awa.dlq_rows()
RETURNS TABLE (
    job_id bigint, queue text, kind text, args jsonb, attempt smallint, dlq_reason text,
    dlq_at timestamptz, last_error text, priority smallint, max_attempts smallint,
    run_at timestamptz, created_at timestamptz, errors jsonb[], metadata jsonb, tags text[],
    unique_key bytea, progress jsonb, run_lease bigint)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_dlq_rows';

CREATE VIEW awa.dlq WITH (security_barrier) AS
    SELECT job_id, queue, kind, args, attempt, dlq_reason, dlq_at, last_error, priority,
           max_attempts, run_at, created_at, errors, metadata, tags, unique_key, progress,
           run_lease
    FROM awa.dlq_rows();

CREATE FUNCTION awa.upsert_queue_descriptor(
    queue text, descriptor jsonb, runtime uuid DEFAULT NULL)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'awa_upsert_queue_descriptor';
COMMENT ON FUNCTION awa.upsert_queue_descriptor IS 'Declares what a queue is for; true: changed';

CREATE FUNCTION awa.upsert_job_kind_descriptor(
    kind text, descriptor jsonb, runtime uuid DEFAULT NULL)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'awa_upsert_job_kind_descriptor';
COMMENT ON FUNCTION awa.upsert_job_kind_descriptor IS
    'Declares what jobs of a kind are; true: changed';

CREATE FUNCTION awa.descriptor_rows(subject text)
RETURNS TABLE (
    name text, display_name text, description text, owner text, docs_url text, tags text[],
    extra jsonb, descriptor_hash text, sync_interval_ms bigint, created_at timestamptz,
    updated_at timestamptz, last_seen_at timestamptz, stale boolean, drifted boolean)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_descriptor_rows';

CREATE VIEW awa.queue_descriptor_status WITH (security_barrier) AS
    SELECT name AS queue, display_name, description, owner, docs_url, tags, extra,
           descriptor_hash, sync_interval_ms, created_at, updated_at, last_seen_at, stale, drifted
    FROM awa.descriptor_rows('queue');

CREATE VIEW awa.job_kind_descriptor_status WITH (security_barrier) AS
    SELECT name AS kind, display_name, description, owner, docs_url, tags, extra,
           descriptor_hash, sync_interval_ms, created_at, updated_at, last_seen_at, stale, drifted
    FROM awa.descriptor_rows('kind');

CREATE FUNCTION awa.queue_stats_rows()
RETURNS TABLE (
    queue text, paused boolean, scheduled bigint, available bigint, running bigint,
    retryable bigint, waiting_external bigint, dlq bigint, completed_total bigint,
    failed_total bigint, cancelled_total bigint, oldest_available_age interval,
    enqueue_rate float8, complete_rate float8)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_queue_stats_rows';

CREATE VIEW awa.queue_stats WITH (security_barrier) AS
    SELECT queue, paused, scheduled, available, running, retryable, waiting_external, dlq,
           completed_total, failed_total, cancelled_total, oldest_available_age,
           enqueue_rate, complete_rate
    FROM awa.queue_stats_rows();

-- What memory knows of a runtime; NULLs where there is no dispatcher to ask (on a standby, and
-- while memory is rebuilt).
CREATE FUNCTION awa.runtime_state(runtime uuid)
RETURNS TABLE (alive boolean, last_seen_at timestamptz, open_attempts bigint, in_flight jsonb)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_runtime_state';

CREATE FUNCTION awa.may_read(queue text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_may_read';
COMMENT ON FUNCTION awa.may_read IS 'Whether the caller may see this queue';

-- The first twenty columns are those that clients of awa 0.6 read: one for whom a runtime is
-- a process that reports itself every so often.
CREATE VIEW awa.runtime_instances WITH (security_barrier) AS
    SELECT r.runtime AS instance_id,
           r.host AS hostname,
           r.pid,
           coalesce(r.opts ->> 'version', '') AS version,
           'queue_storage'::text AS storage_capability,
           'auto'::text AS transition_role,
           r.registered_at AS started_at,
           coalesce(r.ended_at, s.last_seen_at, r.registered_at) AS last_seen_at,
           (coalesce(extract(epoch FROM r.heartbeat_timeout), 30) * 1000)::bigint / 3
               AS snapshot_interval_ms,
           s.alive IS TRUE AS healthy,
           s.alive IS TRUE AS postgres_connected,
           s.alive IS TRUE AS poll_loop_alive,
           s.alive IS TRUE AS heartbeat_alive,
           s.alive IS TRUE AS maintenance_alive,
           false AS shutting_down,
           false AS leader,
           NULL::int AS global_max_workers,
           (SELECT coalesce(jsonb_agg(jsonb_build_object(
                       'queue', q.queue,
                       'in_flight', coalesce(s.in_flight -> q.queue, '0'),
                       'overflow_held', NULL,
                       'config', jsonb_build_object(
                           'mode', 'hard_reserved', 'max_workers', NULL, 'min_workers', NULL,
                           'weight', NULL, 'rate_limit', NULL, 'poll_interval_ms', 0,
                           'deadline_duration_secs', 0, 'priority_aging_interval_secs', 0))
                   ORDER BY q.queue), '[]')
            FROM (SELECT jsonb_array_elements_text(r.opts -> 'queues')
                  WHERE jsonb_typeof(r.opts -> 'queues') = 'array'
                  UNION
                  SELECT jsonb_object_keys(s.in_flight)) AS q (queue)
            WHERE awa.may_read(q.queue)) AS queues,
           (SELECT coalesce(jsonb_object_agg(d.name, d.descriptor_hash), '{}')
            FROM awa.descriptor_declarations AS d
            WHERE d.runtime = r.runtime AND d.subject = 'queue'
              AND awa.may_read(d.name)) AS queue_descriptor_hashes,
           (SELECT coalesce(jsonb_object_agg(d.name, d.descriptor_hash), '{}')
            FROM awa.descriptor_declarations AS d
            WHERE d.runtime = r.runtime AND d.subject = 'kind') AS job_kind_descriptor_hashes,
           r.name,
           r.client_addr,
           r.liveness,
           r.heartbeat_timeout,
           s.alive,
           s.open_attempts,
           coalesce(r.opts -> 'capabilities', 'null') AS capabilities,
           r.registered_by,
           r.ended_at
    FROM awa.runtimes r CROSS JOIN LATERAL awa.runtime_state(r.runtime) s;

CREATE FUNCTION awa.metrics_rows()
RETURNS TABLE (name text, kind text, labels jsonb, value float8)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_metrics_rows';

CREATE VIEW awa.metrics WITH (security_barrier) AS
    SELECT name, kind, labels, value FROM awa.metrics_rows();

-- Operate

CREATE FUNCTION awa.cancel_job(
    job_id bigint, reason text DEFAULT NULL, force boolean DEFAULT false)
RETURNS awa.job_state LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_cancel_job';
COMMENT ON FUNCTION awa.cancel_job IS 'Cancels a job; asks a running one to stop, unless forced';

CREATE FUNCTION awa.cancel_by_unique_key(unique_key text)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_cancel_by_unique_key';
COMMENT ON FUNCTION awa.cancel_by_unique_key IS 'Cancels the job that holds a unique key';

CREATE FUNCTION awa.retry_job(job_id bigint)
RETURNS awa.job_state LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_retry_job';
COMMENT ON FUNCTION awa.retry_job IS 'Makes a failed or cancelled job available again';

CREATE FUNCTION awa.delete_job(job_id bigint)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_delete_job';
COMMENT ON FUNCTION awa.delete_job IS 'Forgets a job that is neither running nor completed';

CREATE FUNCTION awa.retry_failed(queue text DEFAULT NULL, kind text DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_retry_failed';
COMMENT ON FUNCTION awa.retry_failed IS 'Makes failed jobs available again and returns how many';

CREATE FUNCTION awa.discard_failed(queue text DEFAULT NULL, kind text DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_discard_failed';
COMMENT ON FUNCTION awa.discard_failed IS 'Forgets failed jobs and returns how many';

CREATE FUNCTION awa.dlq_retry(job_id bigint, opts jsonb DEFAULT '{}')
RETURNS awa.job_state LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_dlq_retry';
COMMENT ON FUNCTION awa.dlq_retry IS 'Makes a dead letter available again, or schedules it';

CREATE FUNCTION awa.dlq_retry_many(filter jsonb)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_dlq_retry_many';
COMMENT ON FUNCTION awa.dlq_retry_many IS 'Makes dead letters available again and returns how many';

CREATE FUNCTION awa.dlq_purge(filter jsonb)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_dlq_purge';
COMMENT ON FUNCTION awa.dlq_purge IS 'Forgets dead letters and returns how many';

CREATE FUNCTION awa.dlq_move(job_id bigint, reason text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_dlq_move';
COMMENT ON FUNCTION awa.dlq_move IS 'Makes a failed job a dead letter';

CREATE FUNCTION awa.configure_queue(queue text, settings jsonb)
RETURNS jsonb LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_configure_queue';
COMMENT ON FUNCTION awa.configure_queue IS 'Changes settings of a queue and returns all in force';

CREATE FUNCTION awa.prepare_queue(queue text)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_prepare_queue';

CREATE FUNCTION awa.pause_queue(queue text, by text DEFAULT NULL)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_pause_queue';

CREATE FUNCTION awa.resume_queue(queue text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_resume_queue';

CREATE FUNCTION awa.drain_queue(queue text)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_drain_queue';
COMMENT ON FUNCTION awa.drain_queue IS 'Cancels the jobs that wait in a queue and returns how many';

CREATE FUNCTION awa.grant_access(role_name name, profile text, queues text[] DEFAULT NULL)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_grant_access';
COMMENT ON FUNCTION awa.grant_access IS 'Lets a role produce, work, operate or read';

CREATE FUNCTION awa.revoke_access(role_name name)
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_revoke_access';

CREATE FUNCTION awa.rescue(kind text DEFAULT NULL, max_rows int DEFAULT NULL)
RETURNS TABLE (kind text, rescued bigint, pass_end text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_rescue';
COMMENT ON FUNCTION awa.rescue IS 'Gives lost attempts to others, one pass now';

CREATE FUNCTION awa.recover(epoch text, opts jsonb DEFAULT '{}')
RETURNS TABLE (ran boolean, orphaned bigint, rescued bigint)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_recover';
COMMENT ON FUNCTION awa.recover IS 'Re-drives the attempts of dead owners, once an epoch';

CREATE FUNCTION awa.halt_runtime_scope(
    scope text DEFAULT 'maintenance.prune', mode text DEFAULT 'drain', reason text DEFAULT NULL)
RETURNS uuid LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_halt_runtime_scope';
COMMENT ON FUNCTION awa.halt_runtime_scope IS 'Stops a part of maintenance until it is resumed';

CREATE FUNCTION awa.resume_runtime_scope(scope text, halt_id uuid)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_resume_runtime_scope';

CREATE FUNCTION awa.runtime_control_status(scope text DEFAULT 'maintenance.prune')
RETURNS TABLE (
    scope text, desired text, halt_id uuid, reason text, halted_by text, since timestamptz,
    fleet_halted boolean, runtime uuid, runtime_name text, supported boolean, observed text,
    observed_at timestamptz)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_runtime_control_status';

CREATE FUNCTION awa.ensure_claim_batch_job_index(claim_slot int)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'awa_ensure_claim_batch_job_index';
COMMENT ON FUNCTION awa.ensure_claim_batch_job_index IS
    'Makes the index that finds the claims of one job in a segment that stays';

CREATE FUNCTION awa.maintain()
RETURNS TABLE (step text, did bigint, took interval)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_maintain';

CREATE FUNCTION awa.check()
RETURNS TABLE (invariant text, ok boolean, detail text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_check';
COMMENT ON FUNCTION awa.check IS 'Compares memory with the tables and proves the invariants';

CREATE FUNCTION awa.rebuild()
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_rebuild';

-- Rows written by hand, by COPY or by a restore reach memory through a replay.
CREATE FUNCTION awa.foreign_rows()
RETURNS trigger LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_foreign_rows';
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_0
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_0 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_0
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_0 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_0
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_0 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_1
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_1 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_1
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_1 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_1
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_1 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_2
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_2 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_2
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_2 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_2
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_2 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_3
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_3 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_3
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_3 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_3
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_3 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_4
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_4 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_4
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_4 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_4
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_4 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_5
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_5 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_5
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_5 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_5
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_5 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_6
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_6 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_6
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_6 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_6
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_6 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_7
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_7 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_7
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_7 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_7
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_7 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_8
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_8 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_8
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_8 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_8
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_8 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_9
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_9 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_9
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_9 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_9
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_9 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_10
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_10 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_10
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_10 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_10
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_10 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_11
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_11 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_11
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_11 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_11
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_11 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_12
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_12 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_12
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_12 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_12
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_12 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_13
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_13 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_13
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_13 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_13
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_13 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_14
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_14 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_14
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_14 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_14
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_14 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.ready_entries_15
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.ready_entries_15 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_batches_15
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_batches_15 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.lease_claim_closures_15
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.lease_claim_closures_15 ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.deferred_jobs
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.deferred_jobs ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.attempt_state
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.attempt_state ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.queues
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.queues ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.queue_lanes
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.queue_lanes ENABLE ALWAYS TRIGGER foreign_rows;
CREATE TRIGGER foreign_rows AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON awa.segments
    FOR EACH STATEMENT EXECUTE FUNCTION awa.foreign_rows();
ALTER TABLE awa.segments ENABLE ALWAYS TRIGGER foreign_rows;

-- A restore loads the states of the segments after the worker has written the first ones.
CREATE FUNCTION awa.replace_segment()
RETURNS trigger LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'awa_replace_segment';
CREATE TRIGGER replace_segment BEFORE INSERT ON awa.segments
    FOR EACH ROW EXECUTE FUNCTION awa.replace_segment();
ALTER TABLE awa.segments ENABLE ALWAYS TRIGGER replace_segment;
