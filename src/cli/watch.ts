/** `trefoil watch`: the watchdog of a run, in a process of its own. */
import { setTimeout as sleep } from 'node:timers/promises';
import { readVariable } from '../config/legacy/typed-variable.js';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { visible, wrapText } from '../text.js';
import { type Channels, notify } from '../watch/notify.js';
import { describeRow, type RuleRow, verdict } from '../watch/row.js';
import { stateText } from '../watch/state.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { type Tick, Watchdog } from '../watch/watchdog.js';
import { type Io, ProgressLine, printJson } from './shared/io.js';
import { choice, configured, flag, jsonOption, numberFrom, type OptionValues, parsed } from './shared/options.js';
import { printRows } from './shared/rows.js';
import { dirOption, givenThresholds, thresholdOptions } from './shared/run-options.js';

const DEFAULT_INTERVAL_S = 30;
const SHORTEST_INTERVAL_S = 0.05;

const OPTIONS = {
  dir: dirOption(),
  halt: choice('--halt <0|1>', 'write .HALT on a critical alert (default: 0, env NSA_WATCH_HALT)', ['0', '1']),
  interval: parsed(
    '--interval <seconds>',
    `time between checks (default: ${DEFAULT_INTERVAL_S}, env NSA_WATCH_INTERVAL_S)`,
    numberFrom(SHORTEST_INTERVAL_S),
  ),
  once: flag('--once', 'check once and exit'),
  command: flag('--command <text>', 'shell command to run on an alert (env NSA_WATCH_COMMAND)'),
  webhook: flag('--webhook <url>', 'URL that receives a POST on an alert (env NSA_WATCH_WEBHOOK)'),
  ...thresholdOptions(),
  json: jsonOption('{ok, rows: [{rule, level, value, limit}]}'),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Watches until the run ends, or until SIGTERM or Ctrl-C. On a critical alert it
writes .anomaly_type, with --halt 1 also .HALT; for collapsed gates
gate_collapse_details.json, for a stall stackdump_*.txt. The alert command
receives the alert as JSON on stdin and in TREFOIL_ALERT_RULE, _LEVEL, _LINE
and _RUN. Exit code: 0 no critical alert, 1 at least one.
`;

export const configure = configured(OPTIONS, watch, HELP);

async function watch(options: Options, io: Io): Promise<void> {
  const halt = options.halt === undefined ? readVariable(io.env, 'NSA_WATCH_HALT') === true : options.halt === '1';
  const interval =
    options.interval ?? (readVariable(io.env, 'NSA_WATCH_INTERVAL_S') as number | undefined) ?? DEFAULT_INTERVAL_S;
  if (interval < SHORTEST_INTERVAL_S)
    throw new UsageError(`NSA_WATCH_INTERVAL_S: ${interval} is not allowed; a number >= ${SHORTEST_INTERVAL_S}`);
  const channels: Channels = {
    command: options.command ?? (readVariable(io.env, 'NSA_WATCH_COMMAND') as string | undefined),
    webhook: checkedUrl(options.webhook ?? (readVariable(io.env, 'NSA_WATCH_WEBHOOK') as string | undefined)),
  };
  const thresholds = resolveThresholds(io.env, givenThresholds(options));
  const watchdog = new Watchdog({ dir: options.dir, thresholds, halt });
  if (!options.once) {
    const action = halt ? 'halts the run (--halt 1)' : 'is reported and does not stop the run (--halt 1 would)';
    const opening = `watching ${options.dir} every ${interval} s; a critical alert ${action}; Ctrl-C ends`;
    io.err(io.stderr.isTTY ? wrapText(opening, (io.stderr.columns ?? io.width) - 2).join('\n  ') : opening);
  }
  const seen = options.once
    ? await checkOnce(watchdog, channels, io)
    : await checkUntilEnd(watchdog, channels, interval, io);
  const result = verdict(seen.rows);
  if (options.json) printJson(io, result);
  else if (options.once) printRows(io, result.rows, result.ok ? 'healthy' : 'NOT healthy');
  if (!result.ok || seen.hadCritical) io.exitCode = ExitCode.failed;
}

interface Seen {
  readonly rows: readonly RuleRow[];
  readonly hadCritical: boolean;
}

async function checkOnce(watchdog: Watchdog, channels: Channels, io: Io): Promise<Seen> {
  const tick = watchdog.tick();
  io.err(visible(stateText(tick.state)));
  await announce(tick, channels, io);
  return { rows: tick.rows, hadCritical: false };
}

async function checkUntilEnd(watchdog: Watchdog, channels: Channels, interval: number, io: Io): Promise<Seen> {
  const stopping = new AbortController();
  const stop = () => stopping.abort();
  process.on('SIGTERM', stop);
  process.on('SIGINT', stop);
  const progress = new ProgressLine(io);
  let rows: readonly RuleRow[] = [];
  let hadCritical = false;
  let problem = '';
  let state: Tick['state']['name'] | undefined;
  try {
    for (;;) {
      const tick = tryTick(watchdog, (line) => {
        if (line !== problem) io.err(line); // once, not every interval
        problem = line;
      });
      progress.clear();
      if (tick) {
        problem = '';
        rows = tick.rows;
        hadCritical ||= tick.alerts.some(({ level }) => level === 'red');
        if (tick.state.name !== state) io.err(stateLine(tick));
        state = tick.state.name;
        await announce(tick, channels, io);
        if (tick.state.kind === 'ended') break;
        progress.show(progressLine(tick));
      }
      if (await pause(interval, stopping.signal)) {
        progress.clear();
        io.err('stopped watching; the run is not affected');
        break;
      }
    }
  } finally {
    process.off('SIGTERM', stop);
    process.off('SIGINT', stop);
  }
  return { rows, hadCritical };
}

/** Waits for a folder that does not exist yet or cannot be read for a while: reports it and returns undefined. */
function tryTick(watchdog: Watchdog, onProblem: (line: string) => void): Tick | undefined {
  try {
    return watchdog.tick();
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    onProblem(`waiting: ${error.message}`);
    return undefined;
  }
}

function stateLine({ state, step }: Tick): string {
  switch (state.kind) {
    case 'running':
      return `the run is active (${state.name}, ${state.reason}), at step ${step ?? 0}`;
    case 'ended':
      return `the run has ended (${visible(stateText(state))})`;
    case 'gone':
      return `the run ${stateText(state)}; last heartbeat ${Math.round(state.seconds)} s ago, at step ${step ?? 0}`;
    case 'empty':
      return 'no run has started in this folder yet; waiting';
  }
}

function progressLine({ rows, step }: Tick): string {
  const count = (level: RuleRow['level']) => rows.filter((row) => row.level === level).length;
  const time = new Date().toISOString().slice(11, 19);
  return `${time} step ${step ?? 0}; ${count('green')} rules ok, ${count('yellow')} warnings, ${count('red')} critical`;
}

async function announce({ alerts, recovered, actions }: Tick, channels: Channels, io: Io): Promise<void> {
  const now = new Date().toISOString();
  for (const { line } of alerts) io.err(`${now} ${visible(line)}`);
  for (const row of recovered) io.err(`${now} ${row.rule} is back to normal: ${visible(describeRow(row).value)}`);
  for (const action of actions) io.err(`${now} ${action}`);
  await Promise.all(alerts.map((alert) => notify(alert, channels, (line) => io.err(`${now} ${line}`))));
}

/** Waits `seconds`; returns true at once when asked to stop. */
async function pause(seconds: number, signal: AbortSignal): Promise<boolean> {
  try {
    await sleep(seconds * 1000, undefined, { signal });
  } catch (error) {
    if (!signal.aborted) throw error;
  }
  return signal.aborted;
}

function checkedUrl(url: string | undefined): string | undefined {
  if (url === undefined) return undefined;
  if (!URL.canParse(url) || !/^https?:$/.test(new URL(url).protocol))
    throw new UsageError(`--webhook: ${JSON.stringify(url)} is not allowed; give an http or https URL`);
  return url;
}
