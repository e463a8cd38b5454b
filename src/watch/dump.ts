/** Diagnosis of a hanging process from outside: the kernel's view of its threads (/proc). */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { errorCode, writeFileAtomic } from '../files.js';
import type { RunPaths } from '../run/paths.js';

const FILES = ['comm', 'status', 'wchan', 'syscall', 'stack'];

/** Writes stackdump_*_rank{r}_watch.txt; returns its path. The environment of the process is never read. */
export function dumpProcess(paths: RunPaths, rank: number, pid: number, reason: string): string {
  const stamp = new Date().toISOString().replace(/[:.]/g, '-');
  const path = paths.stackdump(`${stamp}_rank${rank}_watch`);
  const threads = namesIn(`/proc/${pid}/task`);
  const parts = threads.map((thread) => {
    const facts = FILES.map((name) => `${name}: ${read(join(`/proc/${pid}/task`, thread, name))}`);
    return `thread ${thread}\n${facts.join('\n')}\n`;
  });
  const body =
    parts.length > 0 ? parts.join('\n') : `process ${pid}: no /proc entry; it is gone or this is not Linux\n`;
  writeFileAtomic(path, `${reason}\npid ${pid}, rank ${rank}, ${new Date().toISOString()}\n\n${body}`);
  return path;
}

function namesIn(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch (error) {
    if (errorCode(error) === undefined) throw error;
    return [];
  }
}

/** Reads a file of /proc; returns the reason if it is forbidden or gone. */
function read(path: string): string {
  try {
    return readFileSync(path, 'utf8').trim();
  } catch (error) {
    const code = errorCode(error);
    if (code === undefined) throw error;
    return code;
  }
}
