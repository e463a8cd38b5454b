/** The thread of a running load (`RunningLoad`): streams one after another, and `/health` every 50 ms. */
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { type IncomingMessage, request } from 'node:http';
import { setTimeout } from 'node:timers/promises';
import { parentPort, workerData } from 'node:worker_threads';
import type { LoadReport } from './load.js';

const STREAMS = 2;
const HEALTH_MS = 50;

const { url, model, pid } = workerData as { url: string; model: string; pid: number };
let isOver = false;
let streams = 0;
let checks = 0;
let worst = 0;
let worstOwn = 0;
const failures: string[] = [];

async function attempt(name: string, work: () => Promise<void>): Promise<void> {
  try {
    await work();
  } catch (error) {
    const { message, cause } = error as Error;
    failures.push(`${name}: ${message} ${String(cause ?? '')}`);
    await setTimeout(200);
  }
}

/** Over a connection of its own: an idle one may be closed at any time. */
async function ask(path: string, body?: string): Promise<{ statusCode: number | undefined; text: string }> {
  const asked = request(url + path, { agent: false, method: body === undefined ? 'GET' : 'POST' });
  asked.end(body);
  const [response] = (await once(asked, 'response')) as [IncomingMessage];
  let text = '';
  for await (const piece of response.setEncoding('utf8')) text += piece;
  return { statusCode: response.statusCode, text };
}

async function stream(): Promise<void> {
  const body = JSON.stringify({ model, prompt: [1, 2, 3], max_tokens: 40, ignore_eos: true, stream: true });
  const { statusCode, text } = await ask('/v1/completions', body);
  if (statusCode === 429)
    await setTimeout(50); // the attack fills the queue, which is its right
  else if (!text.endsWith('data: [DONE]\n\n') || text.includes('data: {"error"'))
    throw new Error(`status ${statusCode}, ends with ${text.slice(-100)}`);
  else streams += 1;
}

/** Processor time of the server's HTTP thread [ms]; 0 where the system does not tell. */
function computedMs(): number {
  try {
    return Number(readFileSync(`/proc/${pid}/task/${pid}/schedstat`, 'utf8').split(' ')[0]) / 1e6;
  } catch {
    return 0; // not Linux
  }
}

async function check(): Promise<void> {
  const [startedAt, computed] = [performance.now(), computedMs()];
  const { statusCode } = await ask('/health');
  worst = Math.max(worst, performance.now() - startedAt);
  worstOwn = Math.max(worstOwn, computedMs() - computed);
  checks += 1;
  if (statusCode !== 200) throw new Error(`status ${statusCode}`);
  await setTimeout(HEALTH_MS);
}

async function repeat(name: string, work: () => Promise<void>): Promise<void> {
  while (!isOver) await attempt(name, work);
}

parentPort?.once('message', () => {
  isOver = true;
});
await Promise.all([...Array.from({ length: STREAMS }, () => repeat('stream', stream)), repeat('/health', check)]);
const report: LoadReport = { streams, checks, worst, worstOwn, failures: failures.slice(0, 5) };
parentPort?.postMessage(report);
