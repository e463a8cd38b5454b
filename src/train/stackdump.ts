/** SIGUSR1: where a run is right now, without stopping it. */
import { writeFileAtomic } from '../run/atomic.js';
import { toJson } from '../run/json.js';

export interface Position {
  readonly step: number;
  readonly section: string;
}

/** Node's report without its environment section, which may hold credentials. */
export function writeStackDump(path: string, position: Position): void {
  const report = process.report.getReport() as unknown as Record<string, unknown>;
  const { javascriptStack, nativeStack, javascriptHeap, resourceUsage } = report;
  const facts = { pid: process.pid, iso: new Date().toISOString(), ...position };
  writeFileAtomic(path, `${toJson({ ...facts, javascriptStack, nativeStack, javascriptHeap, resourceUsage }, 2)}\n`);
}
