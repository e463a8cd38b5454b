/** Running the real command line in tests: `dist/cli/main.js`, built once if it is not there (npm test builds it first). */
import { type ChildProcess, type StdioOptions, spawn, spawnSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

export const root = fileURLToPath(new URL('../..', import.meta.url));
const main = join(root, 'dist', 'cli', 'main.js');

/** The program, built if need be. */
export function trefoilMain(): string {
  if (!existsSync(main)) {
    const result = spawnSync(process.execPath, [join(root, 'scripts', 'build.mjs'), '--quiet'], { encoding: 'utf8' });
    if (result.status !== 0) throw new Error(`the build failed: ${result.stdout}${result.stderr}`);
  }
  return main;
}

export interface CliResult {
  readonly code: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

export type CliEnvironment = Readonly<Record<string, string>>;

export interface ProgramOptions {
  readonly cwd?: string;
  readonly env?: CliEnvironment;
  readonly input?: string;
}

export function trefoil(args: readonly string[], options: ProgramOptions = {}): Promise<CliResult> {
  return runNode([trefoilMain(), ...args], options);
}

/** Not waited for in place: the test runner gives up on a worker that it has not heard from for a minute. */
export async function runNode(args: readonly string[], options: ProgramOptions = {}): Promise<CliResult> {
  const child = spawn(process.execPath, args, {
    cwd: options.cwd ?? root,
    env: { ...process.env, ...options.env },
  });
  let [stdout, stderr] = ['', ''];
  child.stdout.setEncoding('utf8').on('data', (chunk) => {
    stdout += chunk;
  });
  child.stderr.setEncoding('utf8').on('data', (chunk) => {
    stderr += chunk;
  });
  child.stdin.on('error', () => {}); // a program that does not read its input is judged by what it says
  child.stdin.end(options.input ?? '');
  const { code } = await ended(child);
  return { code, stdout, stderr };
}

const OUTPUT: StdioOptions = ['ignore', 'pipe', 'pipe'];

/** Starts a command that the test will watch or kill. */
export function startTrefoil(args: readonly string[], env: CliEnvironment = {}, stdio = OUTPUT): ChildProcess {
  return startProgram(process.execPath, [trefoilMain(), ...args], env, stdio);
}

/** Starts any program so. */
export function startProgram(
  program: string,
  words: readonly string[],
  env: CliEnvironment = {},
  stdio = OUTPUT,
): ChildProcess {
  return spawn(program, words, { cwd: root, env: { ...process.env, ...env }, stdio });
}

/** The end of a started command. */
export function ended(child: ChildProcess): Promise<{ code: number | null; signal: NodeJS.Signals | null }> {
  return new Promise((resolve) => child.once('close', (code, signal) => resolve({ code, signal })));
}
