-- The tables of the extension. Every name is qualified and nothing is granted:
-- a role gets access through awa.grant_access alone.
--
-- The sixteen segments are written out rather than looped over, so that the
-- install script is plain DDL that pg_dump, pgspot and a reader can follow.
-- Claims have a higher toast_tuple_target, which fits one of 1,000 jobs: to compress
-- their job_ids would cost a quarter of the CPU of a drain and save 8 bytes a job.

CREATE TYPE awa.job_state AS ENUM (
    'scheduled', 'available', 'running', 'completed',
    'retryable', 'failed', 'cancelled', 'waiting_external'
);

-- Hands out blocks of 1,024 chunk numbers (see design: positions, ids of lanes
-- and of deferred jobs all come from them), so one WAL record serves a million
-- jobs and no number is ever used twice, not even after a restore.
CREATE SEQUENCE awa.chunk_blocks AS bigint MINVALUE 1 CACHE 1;
SELECT pg_catalog.pg_extension_config_dump('awa.chunk_blocks', '');

-- Segment 0 (young)
CREATE TABLE awa.ready_entries_0 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_0_position ON awa.ready_entries_0 (position);
CREATE INDEX ready_entries_0_job_id ON awa.ready_entries_0 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_0', '');

CREATE TABLE awa.lease_claim_batches_0 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_0', '');

CREATE TABLE awa.lease_claim_closures_0 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_0', '');

-- Segment 1 (young)
CREATE TABLE awa.ready_entries_1 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_1_position ON awa.ready_entries_1 (position);
CREATE INDEX ready_entries_1_job_id ON awa.ready_entries_1 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_1', '');

CREATE TABLE awa.lease_claim_batches_1 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_1', '');

CREATE TABLE awa.lease_claim_closures_1 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_1', '');

-- Segment 2 (young)
CREATE TABLE awa.ready_entries_2 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_2_position ON awa.ready_entries_2 (position);
CREATE INDEX ready_entries_2_job_id ON awa.ready_entries_2 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_2', '');

CREATE TABLE awa.lease_claim_batches_2 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_2', '');

CREATE TABLE awa.lease_claim_closures_2 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_2', '');

-- Segment 3 (young)
CREATE TABLE awa.ready_entries_3 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_3_position ON awa.ready_entries_3 (position);
CREATE INDEX ready_entries_3_job_id ON awa.ready_entries_3 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_3', '');

CREATE TABLE awa.lease_claim_batches_3 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_3', '');

CREATE TABLE awa.lease_claim_closures_3 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_3', '');

-- Segment 4 (young)
CREATE TABLE awa.ready_entries_4 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_4_position ON awa.ready_entries_4 (position);
CREATE INDEX ready_entries_4_job_id ON awa.ready_entries_4 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_4', '');

CREATE TABLE awa.lease_claim_batches_4 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_4', '');

CREATE TABLE awa.lease_claim_closures_4 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_4', '');

-- Segment 5 (young)
CREATE TABLE awa.ready_entries_5 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_5_position ON awa.ready_entries_5 (position);
CREATE INDEX ready_entries_5_job_id ON awa.ready_entries_5 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_5', '');

CREATE TABLE awa.lease_claim_batches_5 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_5', '');

CREATE TABLE awa.lease_claim_closures_5 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_5', '');

-- Segment 6 (young)
CREATE TABLE awa.ready_entries_6 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_6_position ON awa.ready_entries_6 (position);
CREATE INDEX ready_entries_6_job_id ON awa.ready_entries_6 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_6', '');

CREATE TABLE awa.lease_claim_batches_6 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_6', '');

CREATE TABLE awa.lease_claim_closures_6 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_6', '');

-- Segment 7 (young)
CREATE TABLE awa.ready_entries_7 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_7_position ON awa.ready_entries_7 (position);
CREATE INDEX ready_entries_7_job_id ON awa.ready_entries_7 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_7', '');

CREATE TABLE awa.lease_claim_batches_7 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_7', '');

CREATE TABLE awa.lease_claim_closures_7 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_7', '');

-- Segment 8 (young)
CREATE TABLE awa.ready_entries_8 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_8_position ON awa.ready_entries_8 (position);
CREATE INDEX ready_entries_8_job_id ON awa.ready_entries_8 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_8', '');

CREATE TABLE awa.lease_claim_batches_8 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_8', '');

CREATE TABLE awa.lease_claim_closures_8 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_8', '');

-- Segment 9 (young)
CREATE TABLE awa.ready_entries_9 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_9_position ON awa.ready_entries_9 (position);
CREATE INDEX ready_entries_9_job_id ON awa.ready_entries_9 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_9', '');

CREATE TABLE awa.lease_claim_batches_9 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_9', '');

CREATE TABLE awa.lease_claim_closures_9 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_9', '');

-- Segment 10 (young)
CREATE TABLE awa.ready_entries_10 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_10_position ON awa.ready_entries_10 (position);
CREATE INDEX ready_entries_10_job_id ON awa.ready_entries_10 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_10', '');

CREATE TABLE awa.lease_claim_batches_10 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_10', '');

CREATE TABLE awa.lease_claim_closures_10 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_10', '');

-- Segment 11 (young)
CREATE TABLE awa.ready_entries_11 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_11_position ON awa.ready_entries_11 (position);
CREATE INDEX ready_entries_11_job_id ON awa.ready_entries_11 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_11', '');

CREATE TABLE awa.lease_claim_batches_11 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_11', '');

CREATE TABLE awa.lease_claim_closures_11 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_11', '');

-- Segment 12 (old)
CREATE TABLE awa.ready_entries_12 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_12_position ON awa.ready_entries_12 (position);
CREATE INDEX ready_entries_12_job_id ON awa.ready_entries_12 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_12', '');

CREATE TABLE awa.lease_claim_batches_12 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_12', '');

CREATE TABLE awa.lease_claim_closures_12 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_12', '');

-- Segment 13 (old)
CREATE TABLE awa.ready_entries_13 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_13_position ON awa.ready_entries_13 (position);
CREATE INDEX ready_entries_13_job_id ON awa.ready_entries_13 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_13', '');

CREATE TABLE awa.lease_claim_batches_13 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_13', '');

CREATE TABLE awa.lease_claim_closures_13 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_13', '');

-- Segment 14 (old)
CREATE TABLE awa.ready_entries_14 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_14_position ON awa.ready_entries_14 (position);
CREATE INDEX ready_entries_14_job_id ON awa.ready_entries_14 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_14', '');

CREATE TABLE awa.lease_claim_batches_14 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_14', '');

CREATE TABLE awa.lease_claim_closures_14 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_14', '');

-- Segment 15 (old)
CREATE TABLE awa.ready_entries_15 (
    position        bigint NOT NULL,
    lane_id         bigint NOT NULL,
    created_at      timestamptz NOT NULL,
    job_id          bigint,                 -- NULL: equal to position
    run_at          timestamptz,            -- NULL: equal to created_at
    expires_at      timestamptz,
    attempts        smallint NOT NULL,      -- used before this body was written
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb                   -- what is carried over: errors, progress
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
CREATE INDEX ready_entries_15_position ON awa.ready_entries_15 (position);
CREATE INDEX ready_entries_15_job_id ON awa.ready_entries_15 (job_id) WHERE job_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.ready_entries_15', '');

CREATE TABLE awa.lease_claim_batches_15 (
    claim_id    bigint NOT NULL,            -- the receipt of the first item; item i has claim_id + i
    lane_id     bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,                -- NULL: none, or one per item in deadlines
    runtime     uuid,
    attempt     smallint NOT NULL,          -- of every item, unless attempts says otherwise
    priority    smallint,                   -- with which they were claimed; NULL: the lane's
    attempts    smallint[],
    job_ids     bigint[] NOT NULL,
    positions   bigint[],                   -- NULL: equal to job_ids
    deadlines   timestamptz[]
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false, toast_tuple_target = 8160);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_batches_15', '');

CREATE TABLE awa.lease_claim_closures_15 (
    claim_id  bigint,                       -- NULL: jobs that were not claimed, in positions
    closed_at timestamptz NOT NULL,
    due_at    timestamptz,                  -- of released and retryable: ready again then
    outcome   "char" NOT NULL,              -- awa.outcome_name() spells it out
    items     bytea,                        -- bit i (from the low end of byte i/8): item i; NULL: all of the claim
    positions bigint[],
    error     text,
    result    jsonb
) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false);
SELECT pg_catalog.pg_extension_config_dump('awa.lease_claim_closures_15', '');

-- Old generation: updated and deleted from, vacuumed as usual, off the hot path.

CREATE TABLE awa.deferred_jobs (
    job_id          bigint PRIMARY KEY,
    state           awa.job_state NOT NULL CHECK (state IN ('scheduled', 'retryable')),
    run_at          timestamptz NOT NULL,
    queue           text NOT NULL,
    priority        smallint NOT NULL,
    shard           smallint NOT NULL,
    created_at      timestamptz NOT NULL,
    expires_at      timestamptz,
    attempts        smallint NOT NULL,
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb
);
CREATE INDEX deferred_jobs_run_at ON awa.deferred_jobs (run_at);
CREATE INDEX deferred_jobs_queue ON awa.deferred_jobs (queue);
SELECT pg_catalog.pg_extension_config_dump('awa.deferred_jobs', '');

-- Failed and cancelled jobs, whole, for their retention.
CREATE TABLE awa.done_entries (
    job_id          bigint PRIMARY KEY,
    state           awa.job_state NOT NULL CHECK (state IN ('failed', 'cancelled')),
    finalized_at    timestamptz NOT NULL,
    attempted_at    timestamptz,
    last_receipt    bigint,
    queue           text NOT NULL,
    priority        smallint NOT NULL,
    shard           smallint NOT NULL,
    created_at      timestamptz NOT NULL,
    run_at          timestamptz NOT NULL,
    attempts        smallint NOT NULL,
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb
);
CREATE INDEX done_entries_finalized_at ON awa.done_entries (finalized_at);
SELECT pg_catalog.pg_extension_config_dump('awa.done_entries', '');

-- Completed jobs that are kept for longer than their segment is there.
CREATE TABLE awa.completed_entries (
    job_id          bigint PRIMARY KEY,
    result          jsonb,
    finalized_at    timestamptz NOT NULL,
    attempted_at    timestamptz,
    last_receipt    bigint,
    queue           text NOT NULL,
    priority        smallint NOT NULL,
    shard           smallint NOT NULL,
    created_at      timestamptz NOT NULL,
    run_at          timestamptz NOT NULL,
    attempts        smallint NOT NULL,
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb
);
CREATE INDEX completed_entries_finalized_at ON awa.completed_entries (finalized_at);
SELECT pg_catalog.pg_extension_config_dump('awa.completed_entries', '');

CREATE TABLE awa.dlq_entries (
    job_id          bigint PRIMARY KEY,
    dlq_reason      text NOT NULL,
    dlq_at          timestamptz NOT NULL,
    attempted_at    timestamptz,
    last_receipt    bigint,
    queue           text NOT NULL,
    priority        smallint NOT NULL,
    shard           smallint NOT NULL,
    created_at      timestamptz NOT NULL,
    run_at          timestamptz NOT NULL,
    attempts        smallint NOT NULL,
    max_attempts    smallint NOT NULL,
    kind            text NOT NULL,
    args            jsonb NOT NULL,
    metadata        jsonb,
    tags            text[],
    unique_key      bytea,
    unique_states   bit(8),
    ordering_key    bytea,
    concurrency_key bytea,
    attempt_deadline interval,
    history         jsonb
);
CREATE INDEX dlq_entries_dlq_at ON awa.dlq_entries (dlq_at);
SELECT pg_catalog.pg_extension_config_dump('awa.dlq_entries', '');

-- What no segment tells of a queue: the sum of what every transaction appended. Nobody waits
-- for anybody, and to count costs no more than a row a queue: the worker sums up.
CREATE TABLE awa.queue_changes (
    change    uuid PRIMARY KEY DEFAULT pg_catalog.gen_random_uuid(),
    queue     text COLLATE "C" NOT NULL,
    letters   bigint NOT NULL,          -- dead letters that came; less than zero: that went
    cancelled bigint NOT NULL           -- jobs cancelled while they were in no segment
);
SELECT pg_catalog.pg_extension_config_dump('awa.queue_changes', '');

CREATE TABLE awa.job_unique_claims (
    unique_key bytea CONSTRAINT idx_awa_jobs_unique PRIMARY KEY,
    job_id     bigint NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('awa.job_unique_claims', '');

-- Until when no other job is accepted for a key (see the option "throttle").
CREATE TABLE awa.job_throttles (
    unique_key bytea PRIMARY KEY,
    job_id     bigint NOT NULL,
    until      timestamptz NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('awa.job_throttles', '');

CREATE TABLE awa.attempt_state (
    job_id              bigint NOT NULL,
    receipt             bigint NOT NULL,
    progress            jsonb,
    callback_id         uuid,
    callback_timeout_at timestamptz,
    callback_result     jsonb,
    parked              boolean NOT NULL DEFAULT false,
    updated_at          timestamptz NOT NULL,
    cancel_requested_at timestamptz,        -- it was asked to stop
    cancel_reason       text,
    resumed             boolean NOT NULL DEFAULT false,  -- the last callback that was registered was
    leased              boolean NOT NULL DEFAULT false,  -- it was resumed after its owner had gone
    PRIMARY KEY (job_id, receipt)
);
CREATE INDEX attempt_state_callback_id ON awa.attempt_state (callback_id)
    WHERE callback_id IS NOT NULL;
SELECT pg_catalog.pg_extension_config_dump('awa.attempt_state', '');

CREATE TABLE awa.cron_jobs (
    name               text PRIMARY KEY,
    cron               text NOT NULL,
    timezone           text NOT NULL,
    kind               text NOT NULL,
    args               jsonb NOT NULL,
    missed_fire_policy text NOT NULL CHECK (missed_fire_policy IN ('coalesce', 'catch_up')),
    opts               jsonb NOT NULL,
    last_fire_at       timestamptz,
    created_at         timestamptz NOT NULL,
    updated_at         timestamptz NOT NULL,
    paused_at          timestamptz,
    paused_by          text
);
SELECT pg_catalog.pg_extension_config_dump('awa.cron_jobs', '');

CREATE TABLE awa.batch_operations (
    id           uuid PRIMARY KEY,
    kind         text NOT NULL,
    filter       jsonb NOT NULL,
    spec         jsonb NOT NULL,
    state        text NOT NULL,
    submitted_by text,
    submitted_at timestamptz NOT NULL,
    started_at   timestamptz,
    finalized_at timestamptz,
    progress     jsonb NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('awa.batch_operations', '');

-- Control.

CREATE TABLE awa.queues (
    -- C: an order that no change of the operating system's collations can break
    queue      text COLLATE "C" PRIMARY KEY,
    settings   jsonb NOT NULL,
    paused_at  timestamptz,
    paused_by  text,
    created_at timestamptz NOT NULL,
    -- totals; memory counts the ends that "segments" does not say are among them
    completed_total bigint NOT NULL,
    failed_total    bigint NOT NULL,
    cancelled_total bigint NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('awa.queues', '');

-- The pauses in queues once more, under the view awa.queue_meta: clients of awa 0.6 upsert
-- there, which takes a unique index and so no view that triggers write. Triggers keep it; not
-- dumped, since restored rows of queues bring it back.
CREATE TABLE awa.queue_pauses (
    queue     text COLLATE "C" PRIMARY KEY,
    paused    boolean NOT NULL DEFAULT false,
    paused_at timestamptz,
    paused_by text
);

-- Written by each transaction that uses a lane before its row is known to be
-- durable, hence no unique constraint: equal duplicates are harmless and a
-- producer never waits for another one.
CREATE TABLE awa.queue_lanes (
    lane_id  bigint NOT NULL,
    priority smallint NOT NULL,
    shard    smallint NOT NULL,
    queue    text COLLATE "C" NOT NULL
);
CREATE INDEX queue_lanes_queue ON awa.queue_lanes (queue);
CREATE INDEX queue_lanes_lane_id ON awa.queue_lanes (lane_id);
SELECT pg_catalog.pg_extension_config_dump('awa.queue_lanes', '');

CREATE TABLE awa.segments (
    segment    smallint PRIMARY KEY CHECK (segment BETWEEN 0 AND 15),
    generation bigint NOT NULL,             -- counts the truncations
    state      text NOT NULL CHECK (state IN ('free', 'current', 'sealed')),
    since      timestamptz NOT NULL,
    disposed   boolean NOT NULL,            -- no undisposed job is left in it
    directory  bytea,                       -- of a sealed one: its chunks and their bodies
    summary    jsonb,                       -- of a disposed one: how many jobs, the last end
    counted    jsonb                        -- the ends that the totals of queues count
);
-- Seeds are written by the first server that serves the database, never by this
-- script: restored rows would collide with them.
SELECT pg_catalog.pg_extension_config_dump('awa.segments', '');

CREATE TABLE awa.boot_epochs (
    epoch      bigint PRIMARY KEY,          -- ticks of 10 ms since 2025-01-01, the high part of receipts
    started_at timestamptz NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('awa.boot_epochs', '');

-- Who works, and who did until a day ago. A row is written when a runtime registers and when
-- it has ended, never in between: what changes meanwhile is in memory. The view
-- awa.runtime_instances shows both.
CREATE TABLE awa.runtimes (
    runtime           uuid PRIMARY KEY,
    name              text,
    liveness          text NOT NULL CHECK (liveness IN ('session', 'heartbeat')),
    heartbeat_timeout interval,
    host              text NOT NULL,
    pid               int NOT NULL,
    client_addr       inet,
    registered_at     timestamptz NOT NULL,
    registered_by     regrole,
    opts              jsonb NOT NULL,
    ended_at          timestamptz
);
CREATE INDEX runtimes_ended_at ON awa.runtimes (ended_at);
SELECT pg_catalog.pg_extension_config_dump('awa.runtimes', '');

CREATE TABLE awa.recovery_epochs (
    namespace text NOT NULL,
    epoch     text NOT NULL,
    ran_at    timestamptz NOT NULL,
    PRIMARY KEY (namespace, epoch)
);
SELECT pg_catalog.pg_extension_config_dump('awa.recovery_epochs', '');

CREATE TABLE awa.runtime_controls (
    scope     text PRIMARY KEY,
    halt_id   uuid NOT NULL,
    mode      text NOT NULL,
    reason    text,
    halted_by text NOT NULL,
    since     timestamptz NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('awa.runtime_controls', '');

CREATE TABLE awa.runtime_control_observations (
    scope       text NOT NULL,
    runtime     uuid NOT NULL,
    halt_id     uuid,
    observed    text NOT NULL,
    observed_at timestamptz NOT NULL,
    PRIMARY KEY (scope, runtime)
);

CREATE TABLE awa.queue_descriptions (
    queue            text PRIMARY KEY CHECK (length(queue) BETWEEN 1 AND 200),
    display_name     text CHECK (length(display_name) <= 200),
    description      text CHECK (length(description) <= 2000),
    owner            text CHECK (length(owner) <= 200),
    docs_url         text CHECK (length(docs_url) <= 2048),
    tags             text[] NOT NULL DEFAULT '{}' CHECK (cardinality(tags) <= 20),
    extra            jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(extra) = 'object'),
    descriptor_hash  text NOT NULL CHECK (length(descriptor_hash) BETWEEN 1 AND 128),
    sync_interval_ms bigint NOT NULL DEFAULT 10000 CHECK (sync_interval_ms > 0),
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
SELECT pg_catalog.pg_extension_config_dump('awa.queue_descriptions', '');

CREATE TABLE awa.job_kind_descriptions (
    kind             text PRIMARY KEY CHECK (length(kind) BETWEEN 1 AND 200),
    display_name     text CHECK (length(display_name) <= 200),
    description      text CHECK (length(description) <= 2000),
    owner            text CHECK (length(owner) <= 200),
    docs_url         text CHECK (length(docs_url) <= 2048),
    tags             text[] NOT NULL DEFAULT '{}' CHECK (cardinality(tags) <= 20),
    extra            jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(extra) = 'object'),
    descriptor_hash  text NOT NULL CHECK (length(descriptor_hash) BETWEEN 1 AND 128),
    sync_interval_ms bigint NOT NULL DEFAULT 10000 CHECK (sync_interval_ms > 0),
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
SELECT pg_catalog.pg_extension_config_dump('awa.job_kind_descriptions', '');

-- Which descriptor each runtime declares: live ones may disagree.
CREATE TABLE awa.descriptor_declarations (
    runtime         uuid NOT NULL,
    subject         text NOT NULL CHECK (subject IN ('queue', 'kind')),
    name            text NOT NULL,
    descriptor_hash text NOT NULL,
    PRIMARY KEY (runtime, subject, name)
);
SELECT pg_catalog.pg_extension_config_dump('awa.descriptor_declarations', '');

-- Who may do what on which queue; regrole survives a rename and a dump.
CREATE TABLE awa.queue_acl (
    role    regrole NOT NULL,
    profile text NOT NULL CHECK (profile IN ('producer', 'worker', 'operator', 'reader')),
    queue   text NOT NULL,                  -- exact, or a prefix that ends in *; '*' is every queue
    PRIMARY KEY (role, profile, queue)
);
SELECT pg_catalog.pg_extension_config_dump('awa.queue_acl', '');

-- Not dumped: it tells a copy made by CREATE DATABASE ... TEMPLATE (same system,
-- other database: starts paused) from a restored dump (no row).
CREATE TABLE awa.identity (
    system_identifier bigint PRIMARY KEY,
    database          oid NOT NULL,
    first_receipt     bigint NOT NULL,      -- older ones were issued elsewhere: nobody here has them
    copied_from       oid                   -- of a copy: its source; queues without a row are paused
);
