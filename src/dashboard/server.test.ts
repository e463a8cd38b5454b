/** The server over real sockets and files: data, streams, writes, and folders that no trainer wrote. */
import { spawn } from 'node:child_process';
import {
  appendFileSync,
  closeSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readFileSync,
  rmSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { traceText } from '../evaluate/trace.js';
import type { TraceReaders, TraceText, TraceToken } from '../evaluate/trace-view.js';
import { writeTrace } from '../evaluate/write-trace.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import { identityOf } from '../process-identity.js';
import { acquireLock } from '../run/lock.js';
import { openHeartbeats } from '../run/logs/log.js';
import { runPaths } from '../run/paths.js';
import { resolveThresholds } from '../watch/thresholds.js';
import type { Overview, Table } from './answers.js';
import { webFolder } from './assets.js';
import { decodeChartData } from './chart-data.js';
import { readRecords } from './run-files.js';
import { RunLog } from './run-log.js';
import { type Dashboard, startDashboard } from './server.js';
import { writeExampleRun } from './testing/example-run.js';

const SPIKE = 1234;
let folder: string;
let dashboard: Dashboard;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-dashboard-'));
  writeExampleRun(join(folder, 'long'), { steps: 6000, spikeAt: SPIKE, restartAt: 3000 });
  writeExampleRun(join(folder, 'ranks'), { steps: 40, planned: 100, ranks: 3 });
  dashboard = await startDashboard({ dir: folder, host: '127.0.0.1', port: 0, thresholds: resolveThresholds({}) });
});
afterAll(async () => {
  await dashboard.close();
  rmSync(folder, { recursive: true, force: true });
});

const get = (path: string, headers: Record<string, string> = {}) => fetch(`${dashboard.url}${path}`, { headers });
const json = async <Value>(path: string) => (await (await get(path)).json()) as Value;
const columns = async (query: string) =>
  decodeChartData(await (await get(`/api/runs/long/columns?${query}`)).arrayBuffer());

/** A request with any Host header, which fetch does not allow. */
function statusFor(host: string): Promise<number | undefined> {
  const { hostname, port } = new URL(dashboard.url);
  return new Promise((resolve, reject) => {
    request({ host: hostname, port, path: '/api/runs', headers: { host } }, (response) => {
      response.resume();
      resolve(response.statusCode);
    })
      .on('error', reject)
      .end();
  });
}

/** Reads server-sent events until `isEnough`. */
async function events(
  path: string,
  isEnough: (text: string) => boolean,
  headers: Record<string, string> = {},
): Promise<string> {
  const response = await get(path, headers);
  expect(response.headers.get('content-type')).toContain('text/event-stream');
  const reader = response.body!.getReader();
  let text = '';
  while (!isEnough(text)) {
    const { value, done } = await reader.read();
    if (done) throw new Error(`the stream ended after: ${text}`);
    text += new TextDecoder().decode(value);
  }
  await reader.cancel();
  return text;
}

describe('curves', () => {
  it('show the spike of a whole run, and single rows of a zoomed range', async () => {
    const whole = await columns('log=heartbeat');
    expect(whole.buckets).toBeLessThanOrEqual(2048);
    const loss = whole.values.get('loss')!;
    expect(Math.max(...loss.first, ...loss.second)).toBeGreaterThan(6);
    const detail = await columns(`log=heartbeat&from=${SPIKE - 20}&to=${SPIKE + 20}`);
    expect([...detail.steps[1]]).toEqual(Array.from({ length: 41 }, (_, i) => SPIKE - 20 + i));
    expect(detail.exact).toBe(true);
    expect(detail.values.get('loss')!.last[20]).toBeGreaterThan(6);
  });

  it("have the learning rate, the validation loss and metrics of one's own", async () => {
    expect((await columns('log=training')).values.get('lr')!.last.at(-1)).toBeGreaterThan(0);
    expect((await columns('log=val')).values.get('val_loss')!.last).toHaveLength(10);
    const own = await columns('log=own');
    expect(own.columns).toEqual(['recall']);
    expect(own.values.get('recall')!.last.at(-1)).toBe(1);
    const sources = await columns('log=source');
    expect(sources.columns).toEqual(['source_val_loss/code', 'source_val_loss/web']);
    expect((await get('/api/runs/long/columns?log=../../etc/passwd')).status).toBe(400);
  });

  it('come with the marks of checkpoints, evaluations and restarts', async () => {
    const { marks, config, tokensPerStep, row } = await json<Overview>('/api/runs/long');
    expect(new Set(marks.map(({ kind }) => kind))).toEqual(
      new Set(['boot', 'loader_ready', 'checkpoint', 'eval', 'stop', 'spike']),
    );
    // The counter of spikes grew once.
    expect(marks.filter(({ kind }) => kind === 'spike').map(({ step, detail }) => [step, detail])).toEqual([
      [SPIKE, 'unusual loss or gradient'],
    ]);
    expect(marks.filter(({ kind }) => kind === 'boot').map(({ step }) => step)).toEqual([0, 2900]);
    expect(config['train.seq_len']).toBe('2048');
    expect(tokensPerStep).toBe(2048 * 8);
    expect(row).toMatchObject({ state: 'ended', step: 6000, steps: 6000 });
  });
});

it('answers other requests while it computes the table of many runs', async () => {
  const many = mkdtempSync(join(tmpdir(), 'trefoil-many-runs-'));
  for (let i = 0; i < 300; i++) {
    const dir = join(many, `run-${i}`);
    mkdirSync(dir);
    const beat = { ts: 1, iso: '', pid: 1, rank: 0, step: 1, msg: 'progress', loss: i };
    writeFileSync(runPaths(dir).heartbeat(0), `${JSON.stringify(beat)}\n`.repeat(50));
  }
  const crowded = await startDashboard({ dir: many, host: '127.0.0.1', port: 0, thresholds: resolveThresholds({}) });
  try {
    let isDone = false;
    const table = fetch(`${crowded.url}/api/runs`).then(async (response) => {
      isDone = true;
      return (await response.json()) as Table;
    });
    let answered = 0;
    while (!isDone) {
      await (await fetch(`${crowded.url}/favicon.svg`)).text();
      if (!isDone) answered++;
    }
    expect((await table).runs).toHaveLength(300);
    expect(answered).toBeGreaterThan(2);
  } finally {
    await crowded.close();
    rmSync(many, { recursive: true, force: true });
  }
});

describe('streams', () => {
  it('send new rows with byte offsets as ids, and resume after the last one', async () => {
    const path = runPaths(join(folder, 'ranks')).heartbeat(0);
    const start = readFileSync(path).length;
    const writer = openHeartbeats(path, 0);
    const first = events(`/api/stream?run=ranks&from=${start}`, (text) => text.includes('"rows":[['));
    writer.write({ step: 41, msg: 'progress', loss: 1.5 });
    const text = await first;
    expect(text).toContain('event: rows');
    expect(text).toMatch(/"rows":\[\[41,/);
    const id = Number(/id: (\d+)/.exec(text)![1]);
    expect(id).toBe(readFileSync(path).length);
    writer.write({ step: 42, msg: 'progress', loss: 1.4 });
    appendFileSync(path, '{"half'); // a line that is still being written
    const resumed = await events(`/api/stream?run=ranks&from=0`, (more) => more.includes('"rows":[['), {
      'Last-Event-ID': String(id),
    });
    expect(resumed).toMatch(/"rows":\[\[42,/);
    expect(resumed).not.toMatch(/\[41,/);
    truncateSync(path, readFileSync(path).length - 6);
    writer.close();
  });

  it('follow the ranks that are asked for', async () => {
    const paths = runPaths(join(folder, 'ranks'));
    const ends = [1, 2].map((rank) => readFileSync(paths.heartbeat(rank)).length);
    const heard = events(`/api/stream?run=ranks&run=ranks&rank=1&rank=2&from=${ends.join('-')}`, (text) =>
      text.includes('"spike"'),
    );
    const writer = openHeartbeats(paths.heartbeat(2), 2);
    writer.write({ step: 43, msg: 'progress', loss: 1.3, fb_spike: 3 });
    writer.write({ step: 44, msg: 'progress', loss: 1.3, fb_spike: 5 });
    writer.close();
    const text = await heard;
    expect(text).toMatch(/"run":1,"rows":\[\[43,/);
    expect(text).toContain('"kind":"spike","detail":"unusual loss or gradient"');
  });

  it('ask the page to load anew after a file was replaced', async () => {
    expect(await events('/api/stream?run=ranks&from=99999999', (text) => text.includes('reset'))).toContain(
      'event: reset',
    );
    expect((await get('/api/stream?run=ranks&from=x')).status).toBe(400);
  });

  it('go on after a line of any length', async () => {
    const name = 'long-lines';
    writeExampleRun(join(folder, name), { steps: 2, planned: 9 });
    const path = runPaths(join(folder, name)).heartbeat(0);
    const start = readFileSync(path).length;
    const text = events(`/api/stream?run=${name}&from=${start}`, (received) => received.includes('"rows":[[7,'));
    const beat = (step: number, detail = '') =>
      `${JSON.stringify({ ts: 1, iso: '', pid: 1, rank: 0, step, msg: 'progress', loss: 1, detail })}\n`;
    for (const [i, kilobytes] of [300, 900, 1500].entries())
      appendFileSync(path, beat(3 + i, 'x'.repeat(1024 * kilobytes)));
    appendFileSync(path, beat(7));
    // Records of up to 1 MB are read; the longer one is left out.
    expect([...(await text).matchAll(/\[(\d+),1,1,/g)].map(([, step]) => Number(step))).toEqual([3, 4, 7]);
  });

  it('send the table of runs', async () => {
    const text = await events('/api/stream', (more) => more.includes('"name":"ranks"'));
    expect(text).toContain('event: runs');
  });
});

describe('a long log', () => {
  const long = () => join(folder, 'million');
  const rows = (from: number, to: number) => {
    const lines: string[] = [];
    for (let step = from; step <= to; step++)
      lines.push(
        `{"ts":${step},"pid":1,"rank":0,"step":${step},"msg":"progress","loss":${step === 77_777 ? 99 : 2}}\n`,
      );
    return lines.join('');
  };

  it('is drawn whole before it is read, and with every spike afterwards', async () => {
    mkdirSync(long());
    const path = runPaths(long()).heartbeat(0);
    for (let from = 1; from <= 160_000; from += 20_000) appendFileSync(path, rows(from, from + 19_999));
    const log = new RunLog(path, 'heartbeat');
    expect(log.readSlice()).toBe(true);
    const sketch = log.chartData();
    expect(sketch.offset).toBeLessThan(sketch.size / 4);
    expect(sketch.steps[1].at(-1)).toBeGreaterThan(159_000);
    expect([...sketch.steps[1]]).toEqual([...sketch.steps[1]].sort((a, b) => a - b));
    await log.catchUp();
    const whole = log.chartData();
    expect(whole.offset).toBe(whole.size);
    expect(Math.max(...whole.values.get('loss')!.second)).toBe(99);
    expect([...whole.steps[0]].slice(1)).toEqual([...whole.steps[1]].slice(0, -1).map((step) => step + 1));
    rmSync(long(), { recursive: true });
  });

  it('of records is read in pieces: the server goes on', async () => {
    const path = join(folder, 'records.jsonl');
    const filler = 'x'.repeat(900);
    const lines = Array.from({ length: 6000 }, (_, i) => `{"step":${i + 1},"note":"${filler}"}\n`);
    writeFileSync(path, `${lines.join('')}{"half`);
    let turns = 0;
    const timer = setInterval(() => turns++, 0);
    const records = await readRecords(path);
    clearInterval(timer);
    expect(turns).toBeGreaterThan(1);
    expect(records.length).toBeLessThanOrEqual(401);
    expect(records.map(({ step }) => step)).toEqual([...records.map(({ step }) => Number(step))].sort((a, b) => a - b));
    expect([records[0]['step'], records.at(-1)!['step']]).toEqual([1, 6000]);
    rmSync(path);
  });
});

describe('security', () => {
  it('checks the Host header', async () => {
    expect(await Promise.all(['localhost:8000', '127.0.0.1', '[::1]:7070'].map(statusFor))).toEqual([200, 200, 200]);
    expect(await Promise.all(['evil.example', 'localhost.evil.example:7070', ':7070'].map(statusFor))).toEqual([
      421, 421, 421,
    ]);
  });

  it('sends a policy without exceptions and allows nothing from elsewhere', async () => {
    const policy = (await get('/')).headers.get('content-security-policy')!;
    expect(policy).toContain("default-src 'none'");
    expect(policy).not.toContain('unsafe');
    expect(policy).not.toMatch(/https?:|\*/);
  });

  it('looks names up and never joins them to a path', async () => {
    writeFileSync(join(folder, '..', 'outside.txt'), 'secret');
    for (const name of ['..', '%2e%2e', '..%2f..%2fetc', 'long%2f..%2f..', 'long%00', '%ff', '.'])
      expect([400, 404], name).toContain((await get(`/api/runs/${name}/attention`)).status);
    for (const path of ['/../package.json', '/app.js/..%2f..%2f', '/etc/passwd', '/%2e%2e/%2e%2e/etc/passwd'])
      expect((await get(path)).status, path).toBe(404);
    expect((await get('/api/runs/long/trace/..%2f..%2fmetrics')).status).toBe(404);
    for (const inherited of ['constructor', 'toString', '__proto__'])
      expect((await get(`/api/runs/long/${inherited}`)).status, inherited).toBe(404);
    expect((await get('//')).status).toBe(404);
  });

  it('needs the token on an address other than loopback, once in the address, then as a cookie', async () => {
    const open = await startDashboard({ dir: folder, host: '0.0.0.0', port: 0, thresholds: resolveThresholds({}) });
    const url = open.url.replace('0.0.0.0', '127.0.0.1');
    try {
      expect((await fetch(`${url}/api/runs`)).status).toBe(401);
      expect((await fetch(`${url}/?token=wrong`, { redirect: 'manual' })).status).toBe(401);
      const login = await fetch(`${url}/?token=${open.token}`, { redirect: 'manual' });
      expect(login.status).toBe(303);
      const cookie = login.headers.get('set-cookie')!;
      expect(cookie).toMatch(/HttpOnly; SameSite=Strict/);
      expect((await fetch(`${url}/api/runs`, { headers: { cookie: cookie.split(';')[0] } })).status).toBe(200);
      // A cookie is sent by foreign pages too: it must not allow a write.
      const write = { method: 'POST', headers: { cookie: cookie.split(';')[0] } };
      expect((await fetch(`${url}/api/runs/ranks/halt`, write)).status).toBe(403);
    } finally {
      await open.close();
    }
  });
});

describe('halt and save', () => {
  const post = (action: string, token: string, body = '') =>
    fetch(`${dashboard.url}/api/runs/ranks/${action}`, {
      method: 'POST',
      headers: { Authorization: `Bearer ${token}` },
      body,
    });

  it('need the token and an active run', async () => {
    expect((await post('halt', 'wrong')).status).toBe(403);
    expect((await post('halt', dashboard.token)).status).toBe(422);
    expect((await post('save', dashboard.token)).status).toBe(422);
    expect((await post('delete', dashboard.token)).status).toBe(404);
    expect((await post('halt', dashboard.token, 'x'.repeat(10_000))).status).toBe(413);
  });

  it('write .HALT, and signal the process of the run', async () => {
    const { lock: path, halt } = runPaths(join(folder, 'ranks'));
    const lock = acquireLock(path); // this process plays the trainer
    const heartbeats = openSync(runPaths(join(folder, 'ranks')).heartbeat(0), 'a');
    let saves = 0;
    const count = () => {
      saves += 1;
    };
    process.on('SIGUSR2', count);
    try {
      expect((await post('save', dashboard.token)).status).toBe(200);
      await expect.poll(() => saves).toBe(1);
      expect((await post('halt', dashboard.token, '{"reason":"too\\nslow"}')).status).toBe(200);
      expect(readFileSync(halt, 'utf8')).toBe('halt: too slow\n');
    } finally {
      process.off('SIGUSR2', count);
      closeSync(heartbeats);
      lock.release();
      rmSync(halt);
    }
  });
});

describe('a run folder of a stranger', () => {
  it('does not name the process that a save signals', async () => {
    const victim = spawn('sleep', ['60'], { stdio: 'ignore' });
    const { lock: path } = runPaths(join(folder, 'ranks'));
    const owner = { ...identityOf(victim.pid!), run_start: new Date().toISOString(), nonce: 'n' };
    writeFileSync(path, JSON.stringify(owner));
    try {
      const headers = { Authorization: `Bearer ${dashboard.token}` };
      const response = await fetch(`${dashboard.url}/api/runs/ranks/save`, { method: 'POST', headers });
      expect({ status: response.status, text: await response.text() }).toEqual({
        status: 422,
        text: expect.stringContaining(`process ${victim.pid} does not write this run`),
      });
      expect(victim.exitCode ?? victim.signalCode).toBe(null);
    } finally {
      victim.kill('SIGKILL');
      rmSync(path);
    }
  });

  it('is shown with what can be shown, however deep its files are nested', async () => {
    const dir = join(folder, 'deep');
    writeExampleRun(dir, { steps: 20 });
    const deep = `${'{"a":'.repeat(50_000)}1${'}'.repeat(50_000)}`;
    for (const name of ['metrics.json', 'env.json', 'needle.json']) writeFileSync(join(dir, name), deep);
    writeFileSync(runPaths(dir).samples, `{"step":1,"text":${deep}}\n{"step":2,"text":"kept"}\n`);
    const overview = await get('/api/runs/deep');
    expect({ status: overview.status, metrics: ((await overview.json()) as Overview).metrics }).toEqual({
      status: 200,
      metrics: null,
    });
    expect((await get('/api/runs/deep/attention')).status).toBe(200);
    expect(await json('/api/runs/deep/samples')).toEqual({ samples: [{ step: 2, text: 'kept' }] });
    rmSync(dir, { recursive: true });
  });

  it('cannot be asked for a thousand times in one stream', async () => {
    const many = (count: number) => `/api/stream?${'run=long&'.repeat(count)}from=${Array(count).fill(0).join('-')}`;
    expect((await get(many(33))).status).toBe(400);
    const open = await Promise.all(Array.from({ length: 9 }, () => get(many(32))));
    expect(open.map(({ status }) => status)).toEqual([...Array(8).fill(200), 503]);
    await Promise.all(open.map(({ body }) => body?.cancel()));
    await expect
      .poll(async () => {
        const again = await get(many(32));
        await again.body?.cancel();
        return again.status;
      })
      .toBe(200);
  });
});

describe('folders that are not sound runs', () => {
  const rowOf = async (name: string) => (await json<Table>('/api/runs')).runs.find((row) => row.name === name);

  it('are shown as what they are', async () => {
    const make = (name: string) => {
      mkdirSync(join(folder, name));
      return runPaths(join(folder, name));
    };
    symlinkSync('/etc/passwd', make('linked').config);
    writeFileSync(runPaths(join(folder, 'linked')).training, '');
    mkdirSync(make('folder').training);
    writeFileSync(make('empty').heartbeat(0), '');
    writeFileSync(make('half').heartbeat(0), '{"ts":1,"pid":1,"rank":0,"step":1,"msg":"prog');
    const garbage = make('garbage');
    writeFileSync(garbage.heartbeat(0), `\u0000\u0001 no json\n${'x'.repeat(3_000_000)}\n{"ts":1}\n[]\n`);
    writeFileSync(garbage.config, 'a: [1, 2\n');
    writeFileSync(garbage.env, '{{{');
    const bomb = make('bomb');
    writeFileSync(bomb.training, 'step,loss,lr,toks_per_s\n1,2,3,4\nx,y\n');
    writeFileSync(bomb.config, 'a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]\n');
    symlinkSync(folder, join(folder, 'link-to-a-folder'));
    expect(await rowOf('linked')).toMatchObject({
      state: 'broken',
      detail: 'config.yaml: is a symbolic link, not a regular file',
    });
    expect(await rowOf('folder')).toMatchObject({
      state: 'broken',
      detail: 'training.csv: is a folder, not a regular file',
    });
    expect((await rowOf('empty'))?.state).toBe('empty');
    expect((await rowOf('half'))?.state).toBe('empty');
    expect((await rowOf('garbage'))?.state).toBe('empty');
    expect(await rowOf('link-to-a-folder')).toBeUndefined();
    expect((await get('/api/runs/linked/columns')).status).toBe(422);
    const shown = await json<Overview>('/api/runs/garbage');
    expect(shown).toMatchObject({ damaged: 3, environment: null });
    expect(shown.row.problems.join()).toContain('config.yaml');
    expect((await json<Overview>('/api/runs/bomb')).row.problems).toEqual(['config.yaml: contains aliases']);
    const data = decodeChartData(await (await get('/api/runs/bomb/columns?log=training')).arrayBuffer());
    expect([...data.steps[1]]).toEqual([1]);
    expect(JSON.stringify(await json('/api/runs'))).not.toContain('root:');
  });

  it('may appear and disappear while the server runs', async () => {
    writeExampleRun(join(folder, 'brief'), { steps: 5 });
    expect((await rowOf('brief'))?.step).toBe(5);
    rmSync(join(folder, 'brief'), { recursive: true });
    expect(await rowOf('brief')).toBeUndefined();
    expect((await get('/api/runs/brief')).status).toBe(404);
  });
});

describe('traces', () => {
  it('are served by token and by block, and refused when they are something else', async () => {
    const config = tinyConfig();
    const model = tinyModel(config);
    const text = 'the quick brown fox jumps over the lazy dog, again and again and again';
    const tokens = [...Buffer.from(text)];
    const trace = traceText(model, tokens);
    const traces = join(folder, 'long', 'traces');
    mkdirSync(traces, { recursive: true });
    writeTrace(join(traces, 'fox.safetensors'), model, trace, { model: 'tiny', step: 7, pieces: [...text] });
    model.free();
    writeFileSync(join(traces, 'bad.safetensors'), 'not one');
    const shown = await json<TraceText>('/api/runs/long/trace/fox');
    expect(shown).toMatchObject({ layers: 2, groups: 2, slots: 3, blockSize: 8, window: 6, step: 7 });
    expect(shown.pieces.join('')).toBe(text);
    expect(shown.logprobs.at(-1)).toBeNull();
    expect(shown.logprobs[0]).toBeLessThan(0);
    const at = 60;
    const token = await json<TraceToken>(`/api/runs/long/trace/fox/token/${at}`);
    const flat = (layer: number, group: number) =>
      [...trace.selected.subarray(((layer * tokens.length + at) * 2 + group) * 3).subarray(0, 3)].filter(
        (block) => block >= 0,
      );
    expect(token.selected).toEqual([0, 1].map((layer) => [0, 1].map((group) => flat(layer, group))));
    expect(token.gates[0][0].reduce((sum, share) => sum + share, 0)).toBeCloseTo(1, 1);
    const { readers } = await json<TraceReaders>('/api/runs/long/trace/fox/block/0');
    expect(readers).toHaveLength(tokens.length); // block 0 is always read
    expect((await get('/api/runs/long/trace/bad')).status).toBe(422);
    expect((await get('/api/runs/long/trace/fox/token/9999')).status).toBe(422);
    expect((await json<Overview>('/api/runs/long')).traces).toEqual(['bad', 'fox']);
  });
});

describe('the bundle', () => {
  it('has at most 100 KB gzipped', () => {
    const bytes = ['app.js', 'app.css', 'index.html'].map(
      (name) => gzipSync(readFileSync(new URL(name, webFolder()))).length,
    );
    expect(bytes.reduce((sum, size) => sum + size, 0)).toBeLessThan(100_000);
  });
});
