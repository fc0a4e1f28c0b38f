// A whole worker in Node: what it prints is compared by tests/test_drivers.py.
'use strict';
const { Client } = require('pg');

async function main() {
  const [host, port, database, queue] = process.argv.slice(2);
  const client = new Client({ host, port: Number(port), database, user: 'postgres' });
  await client.connect();
  const say = (name, value) => console.log(JSON.stringify([name, value]));

  const inserted = await client.query({
    name: 'insert',
    text: 'SELECT awa.insert_job($1, $2, $3) AS id',
    values: ['node', { text: 'é😀', list: [1, 2.5, null] }, queue],
  });
  say('id type', typeof inserted.rows[0].id);

  const runtime = (await client.query("SELECT awa.register_runtime('node') AS id")).rows[0].id;
  const ready = await client.query("CALL awa.wait_for_jobs($1, '10 s')", [[queue]]);
  say('ready', ready.rows[0].available);

  // A receipt exceeds 2^53: the driver gives a string, and it goes back as one.
  const { rows } = await client.query({
    name: 'claim',
    text: 'SELECT * FROM awa.claim($1, $2, $3)',
    values: [queue, 10, runtime],
  });
  say('claimed', rows.length);
  say('receipt', [typeof rows[0].receipt, Number.isSafeInteger(Number(rows[0].receipt))]);
  say('args', rows[0].args);

  await client.query('BEGIN');
  await client.query('SELECT awa.complete($1)', [rows[0].receipt]);
  await client.query('COMMIT');
  try {
    await client.query('SELECT awa.complete($1)', [rows[0].receipt]);
    say('stale', null);
  } catch (error) {
    say('stale', error.code);
  }
  const many = await client.query('SELECT * FROM awa.complete_many($1)', [
    rows.slice(1).map((row) => row.receipt),
  ]);
  say('completed', many.rows.filter((row) => row.completed).length);
  await client.end();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
