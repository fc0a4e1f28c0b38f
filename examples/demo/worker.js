// A worker in Node: the same as worker.py, by the same SQL.
//
//     node worker.js SOCKET-DIR PORT DATABASE QUEUE NAME
'use strict';
const { createHash } = require('crypto');
const { readFileSync } = require('fs');
const { Client } = require('pg');

const BATCH = 25;

async function main() {
  const [host, port, database, queue, name] = process.argv.slice(2);
  let stopping = false;
  process.on('SIGTERM', () => (stopping = true));

  const client = new Client({ host, port: Number(port), database, user: 'postgres' });
  await client.connect();
  // Should this session end, for any reason, its jobs are given to others.
  const registered = await client.query('SELECT awa.register_runtime($1) AS runtime', [name]);
  const runtime = registered.rows[0].runtime;

  while (!stopping) {
    const { rows: jobs } = await client.query({
      name: 'claim',
      text: "SELECT receipt, job_id, args->>'path' AS path, attempt FROM awa.claim($1, $2, $3)",
      values: [queue, BATCH, runtime],
    });
    if (jobs.length === 0) {
      // Wakes at the commit that makes a job ready; no polling.
      await client.query("CALL awa.wait_for_jobs($1, '500 ms')", [[queue]]);
      continue;
    }
    // Receipts exceed 2^53: the driver hands them out as strings, and takes them so.
    console.log(JSON.stringify(jobs.map((job) => [job.receipt, job.job_id])));
    for (const { receipt, path, attempt } of jobs) {
      const content = readFileSync(path);
      const hash = createHash('sha256').update(content).digest('hex');
      await client.query('BEGIN');
      try {
        await client.query({
          name: 'result',
          text: 'INSERT INTO results VALUES ($1, $2, $3, $4, $5, $6)',
          values: [path, hash, content.length, name, receipt, attempt],
        });
        await client.query({ name: 'complete', text: 'SELECT awa.complete($1)', values: [receipt] });
        await client.query('COMMIT');
      } catch (error) {
        await client.query('ROLLBACK');
        throw error;
      }
    }
  }
  await client.end();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
