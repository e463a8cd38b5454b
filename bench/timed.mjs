// Runs a program and measures it: wall seconds, CPU seconds of it and its threads, peak of its resident memory (Linux, bash).
import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';

/** Prints the process id, runs the program, and prints the CPU times of the shell and of its children, on descriptor 3. */
const TIMED = '"$@" & echo $! >&3; wait $!; code=$?; times >&3; exit $code';

export async function timed(program, words) {
  const started = performance.now();
  const stdio = ['ignore', 'pipe', 'inherit', 'pipe'];
  const child = spawn('bash', ['-c', TIMED, 'timed', program, ...words], { stdio });
  let [output, told] = ['', ''];
  child.stdout.on('data', (data) => {
    output += data;
  });
  child.stdio[3].on('data', (data) => {
    told += data;
  });
  let peak = 0;
  const timer = setInterval(() => {
    try {
      const status = readFileSync(`/proc/${told.split('\n')[0]}/status`, 'utf8');
      peak = Math.max(peak, Number(/VmHWM:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1024);
    } catch {
      // It has not begun yet, or has just ended.
    }
  }, 50);
  const code = await new Promise((resolve) => child.on('close', resolve));
  clearInterval(timer);
  if (code !== 0) throw new Error(`${program} ended with code ${code}`);
  const times = [
    ...told
      .trim()
      .split('\n')
      .at(-1)
      .matchAll(/(\d+)m([\d.]+)s/g),
  ];
  const cpu = times.reduce((sum, [, minutes, seconds]) => sum + 60 * Number(minutes) + Number(seconds), 0);
  return { output, seconds: (performance.now() - started) / 1000, cpu_seconds: cpu, peak_mib: Math.round(peak) };
}
