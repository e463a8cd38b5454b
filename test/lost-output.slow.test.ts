/** A training whose output cannot be written: on a full disk, or on a terminal that was closed. The run goes on. */
import { spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { ended, trefoilMain } from '../src/testing/cli.js';
import { describeUnless } from '../src/testing/devices.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const shell = (script: string) => ended(spawn('bash', ['-c', script], { cwd: folder.path, stdio: 'ignore' }));

/** Writes a config; returns its command and its folder. */
function prepare(name: string, steps: number) {
  const outDir = join(folder.path, name);
  const config = tinyConfig(folder.path, { train: { steps, save_every: 5, log_every: 1, out_dir: outDir } });
  const file = join(folder.path, `${name}.yaml`);
  writeFileSync(file, stringify(config));
  return { outDir, command: `"${process.execPath}" "${trefoilMain()}" train --config "${file}"` };
}

const model = (outDir: string) => readFileSync(join(outDir, 'model.safetensors'));
const status = (outDir: string) => JSON.parse(readFileSync(join(outDir, 'metrics.json'), 'utf8')).status;

const noFull = existsSync('/dev/full') ? null : 'no /dev/full: this is not Linux';
describeUnless(noFull, 'a full disk under stdout', () => {
  it('costs a run its log lines and nothing else', async () => {
    const [heard, unheard] = [prepare('heard', 12), prepare('unheard', 12)];
    expect(await shell(`${heard.command} > log`)).toEqual({ code: 0, signal: null });
    expect(await shell(`${unheard.command} > /dev/full 2> errors`)).toEqual({ code: 0, signal: null });
    expect(model(unheard.outDir).equals(model(heard.outDir))).toBe(true);
    expect(readdirSync(unheard.outDir).sort()).toEqual(readdirSync(heard.outDir).sort());
    const errors = readFileSync(join(folder.path, 'errors'), 'utf8');
    expect(errors).toMatch(
      /^warning: stdout: no space left on the disk; .*\n(.*\n)*warning: stdout: \d+ writes did not/,
    );
    expect(await shell(`${prepare('silent', 12).command} > /dev/full 2>&1`)).toEqual({ code: 0, signal: null });
    expect(status(join(folder.path, 'silent'))).toBe('done');
  });

  it('fails a command whose result is its output', async () => {
    expect(await shell(`"${process.execPath}" "${trefoilMain()}" configs > /dev/full`)).toEqual({
      code: 1,
      signal: null,
    });
  });

  it('is over when there is space again', async (context) => {
    const disk = join(folder.path, 'disk');
    mkdirSync(disk);
    const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', disk], { encoding: 'utf8' });
    if (mount.status !== 0) context.skip(`cannot mount a tmpfs: ${mount.stderr.trim()}`);
    try {
      const { outDir, command } = prepare('patient', 400);
      writeFileSync(join(disk, 'ballast'), '');
      spawnSync('dd', ['if=/dev/zero', `of=${join(disk, 'ballast')}`, 'bs=4096']);
      const run = shell(`${command} > disk/log 2>&1`);
      await expect.poll(() => existsSync(join(outDir, 'checkpoints', 'step-5'))).toBe(true);
      rmSync(join(disk, 'ballast'));
      expect(await run).toEqual({ code: 0, signal: null });
      expect(readFileSync(join(disk, 'log'), 'utf8')).toContain('step 0400 | loss');
    } finally {
      expect(spawnSync('umount', ['-l', disk]).status).toBe(0);
    }
  });
});

const noTerminal =
  spawnSync('script', ['--version']).status === 0 ? null : 'no script (Debian: apt-get install bsdutils)';
describeUnless(noTerminal, 'a terminal that is closed', () => {
  /** Runs a script of bash, the leader of a session, on a terminal that closes after a few steps. Returns its file `rc`. */
  async function onClosed(script: string, outDir: string): Promise<string> {
    writeFileSync(join(folder.path, 'script.sh'), script);
    const terminal = spawn('script', ['-qec', 'bash script.sh', '/dev/null'], {
      cwd: folder.path,
      // bash replaces itself with the only command of `-c`, so the script leads the session; when a leader ends, as dash
      // would, the kernel sends SIGHUP to the others.
      env: { ...process.env, SHELL: '/bin/bash' },
      stdio: ['ignore', 'pipe', 'ignore'],
    });
    terminal.stdout.resume();
    await expect.poll(() => existsSync(join(outDir, 'checkpoints', 'step-5'))).toBe(true);
    terminal.kill('SIGKILL');
    const file = join(folder.path, 'rc');
    await expect.poll(() => existsSync(file) && readFileSync(file, 'utf8')).toContain('\n');
    return readFileSync(file, 'utf8');
  }

  it('stops the run after a checkpoint, with its exit code', async () => {
    const { outDir, command } = prepare('stopped', 100_000);
    const script = `trap 'kill -HUP $pid' HUP\n${command} &\npid=$!\nwait $pid\nwait $pid\necho $? > rc\n`;
    expect(await onClosed(script, outDir)).toBe('4\n');
    expect(status(outDir)).toBe('signalled');
    expect(existsSync(join(outDir, '.lock'))).toBe(false);
  });

  it('does not end a run that ignores SIGHUP by its output', async () => {
    const { outDir, command } = prepare('deaf', 300);
    expect(await onClosed(`trap '' HUP\n${command}\necho $? > rc\n`, outDir)).toBe('0\n');
    expect(status(outDir)).toBe('done');
  });
});
