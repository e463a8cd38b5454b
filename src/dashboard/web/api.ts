/** Requests to the dashboard's server. */

import type { TraceReaders, TraceText, TraceToken } from '../../evaluate/trace-view.js';
import type { AttentionStatistics } from '../../train/observers.js';
import type { Overview, Table } from '../answers.js';
import { type ChartData, decodeChartData } from '../chart-data.js';

/** A line of attention.jsonl. Older runs lack the statistics of the selection. */
export type AttentionRecord = { readonly step: number } & Partial<AttentionStatistics> &
  Pick<AttentionStatistics, 'entropy' | 'collapse' | 'cmp' | 'sel' | 'win'>;

export interface NeedleRow {
  readonly without: string | null;
  readonly length: number;
  readonly depth: number;
  readonly accuracy: number;
  readonly trials: number;
}

export interface Sample {
  readonly step: number;
  readonly ts?: number;
  readonly text: string;
}

/** The server refused; the message is meant for the reader. */
export class ApiError extends Error {}

async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const response = await fetch(path, options);
  if (response.ok) return response;
  const answer: unknown = await response.json().catch(() => null);
  const message = (answer as { error?: unknown } | null)?.error;
  throw new ApiError(typeof message === 'string' ? message : `the server answered ${response.status}`);
}

async function json<Value>(path: string): Promise<Value> {
  return (await (await request(path)).json()) as Value;
}

const runPath = (name: string, ...rest: string[]) => ['/api/runs', name, ...rest].map(encodePart).join('/');
const encodePart = (part: string, i: number) => (i === 0 ? part : encodeURIComponent(part));

export const api = {
  runs: () => json<Table>('/api/runs'),
  overview: (name: string) => json<Overview>(runPath(name)),
  attention: (name: string) =>
    json<{ records: AttentionRecord[]; needle: { rows?: NeedleRow[] } | null }>(runPath(name, 'attention')),
  samples: (name: string) => json<{ samples: Sample[] }>(runPath(name, 'samples')),
  trace: (name: string, trace: string) => json<TraceText>(runPath(name, 'trace', trace)),
  traceToken: (name: string, trace: string, index: number) =>
    json<TraceToken>(runPath(name, 'trace', trace, 'token', String(index))),
  traceReaders: (name: string, trace: string, block: number) =>
    json<TraceReaders>(runPath(name, 'trace', trace, 'block', String(block))),
  async columns(name: string, query: Readonly<Record<string, string | number>>): Promise<ChartData> {
    const search = new URLSearchParams(Object.entries(query).map(([key, value]) => [key, String(value)]));
    return decodeChartData(await (await request(`${runPath(name, 'columns')}?${search}`)).arrayBuffer());
  },
  async control(name: string, action: 'halt' | 'save', token: string, reason = ''): Promise<string> {
    const headers = { Authorization: `Bearer ${token}`, 'Content-Type': 'application/json' };
    const body = JSON.stringify({ reason });
    const response = await request(runPath(name, action), { method: 'POST', headers, body });
    return ((await response.json()) as { message: string }).message;
  },
};
