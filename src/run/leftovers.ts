/** What killed processes left behind: files and folders that have the pid of their process in their names. */
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { pidExists } from '../process-identity.js';
import { errorCode, fileError } from './atomic.js';

/** The names in a folder; none when it is not there. */
export function namesIn(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch (error) {
    if (errorCode(error) === 'ENOENT') return [];
    throw fileError('list', folder, error);
  }
}

/** Those that no other living process works on. The first group of `pattern` is the pid. */
export function leftBehind(folder: string, pattern: RegExp): string[] {
  const isLeft = (name: string): boolean => {
    const match = pattern.exec(name);
    if (!match) return false;
    const pid = Number(match[1]);
    return pid === process.pid || !pidExists(pid);
  };
  return namesIn(folder)
    .filter(isLeft)
    .map((name) => join(folder, name));
}
