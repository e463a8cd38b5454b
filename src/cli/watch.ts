/** `trefoil watch`: the watchdog of a run, as a process of its own. */
import { type Command, Option } from 'commander';
import { readVariable } from '../config/legacy/typed-variable.js';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { type Channels, notify } from '../watch/notify.js';
import { type Row, verdict } from '../watch/row.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { type Tick, Watchdog } from '../watch/watchdog.js';
import { type Io, printJson } from './shared/io.js';
import { jsonOption } from './shared/options.js';
import { rowSummary, rowTable } from './shared/rows.js';
import { addThresholdOptions, dirOption, givenThresholds, numberFrom } from './shared/run-options.js';

interface Options {
  readonly dir: string;
  readonly halt?: string;
  readonly interval?: number;
  readonly once?: boolean;
  readonly command?: string;
  readonly webhook?: string;
  readonly json?: boolean;
}

const DEFAULT_INTERVAL_S = 30;
const SHORTEST_INTERVAL_S = 0.05;

export function configure(command: Command, io: Io): void {
  command
    .addOption(dirOption())
    .addOption(
      new Option('--halt <0|1>', 'write .HALT on a critical alert (default: 0, env NSA_WATCH_HALT)').choices([
        '0',
        '1',
      ]),
    )
    .addOption(
      new Option(
        '--interval <seconds>',
        `time between two looks (default: ${DEFAULT_INTERVAL_S}, env NSA_WATCH_INTERVAL_S)`,
      ).argParser(numberFrom(SHORTEST_INTERVAL_S)),
    )
    .addOption(new Option('--once', 'look once and end'))
    .addOption(new Option('--command <text>', 'shell command to run on an alert (env NSA_WATCH_COMMAND)'))
    .addOption(new Option('--webhook <url>', 'URL that gets a POST on an alert (env NSA_WATCH_WEBHOOK)'));
  addThresholdOptions(command)
    .addOption(jsonOption())
    .addHelpText('after', HELP)
    .action((options: Options) => watch(options, io));
}

const HELP = `
Watches until the run ends, or until SIGTERM or Ctrl-C. On a critical alert it writes .anomaly_type, with --halt 1 also
.HALT, for collapsed gates gate_collapse_details.json, for a stall stackdump_*.txt. An alert command gets the alert as
JSON on its input and in TREFOIL_ALERT_RULE, _LEVEL, _LINE and _RUN.
Exit code: 0 nothing critical was seen, 1 something was.
`;

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
  const thresholds = resolveThresholds(io.env, givenThresholds({ ...options }));
  const watchdog = new Watchdog({ dir: options.dir, thresholds, halt });
  const seen = options.once
    ? await lookOnce(watchdog, channels, io)
    : await lookUntilEnd(watchdog, channels, interval, io);
  const result = verdict(seen.rows);
  if (options.json) printJson(io, result);
  else if (options.once) {
    io.out(rowTable(result.rows));
    io.out(`${result.ok ? 'healthy' : 'NOT healthy'}: ${rowSummary(result.rows)}`);
  }
  if (!result.ok || seen.hadCritical) io.exitCode = ExitCode.failed;
}

interface Seen {
  readonly rows: readonly Row[];
  readonly hadCritical: boolean;
}

async function lookOnce(watchdog: Watchdog, channels: Channels, io: Io): Promise<Seen> {
  const tick = watchdog.tick();
  await tell(tick, channels, io);
  return { rows: tick.rows, hadCritical: false };
}

async function lookUntilEnd(watchdog: Watchdog, channels: Channels, interval: number, io: Io): Promise<Seen> {
  const stopping = new AbortController();
  const stop = () => stopping.abort();
  process.on('SIGTERM', stop);
  process.on('SIGINT', stop);
  let rows: readonly Row[] = [];
  let hadCritical = false;
  let problem = '';
  try {
    for (;;) {
      const tick = look(watchdog, (line) => {
        if (line !== problem) io.err(line); // once, not every interval
        problem = line;
      });
      if (tick) {
        problem = '';
        rows = tick.rows;
        hadCritical ||= tick.alerts.some(({ level }) => level === 'red');
        await tell(tick, channels, io);
        if (tick.state.kind === 'ended') {
          io.err(`the run has ended (${tick.state.how})`);
          break;
        }
      }
      if (await pause(interval, stopping.signal)) break;
    }
  } finally {
    process.off('SIGTERM', stop);
    process.off('SIGINT', stop);
  }
  return { rows, hadCritical };
}

/** A folder that is not there yet, or not readable for a while, is waited for. */
function look(watchdog: Watchdog, onProblem: (line: string) => void): Tick | undefined {
  try {
    return watchdog.tick();
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    onProblem(`waiting: ${error.message}`);
    return undefined;
  }
}

async function tell({ alerts, recovered, actions }: Tick, channels: Channels, io: Io): Promise<void> {
  const now = new Date().toISOString();
  for (const { line } of alerts) io.err(`${now} ${line}`);
  for (const rule of recovered) io.err(`${now} ${rule} is fine again`);
  for (const action of actions) io.err(`${now} ${action}`);
  await Promise.all(alerts.map((alert) => notify(alert, channels, (line) => io.err(`${now} ${line}`))));
}

/** Waits; true when asked to stop. */
function pause(seconds: number, signal: AbortSignal): Promise<boolean> {
  return new Promise((resolve) => {
    if (signal.aborted) return resolve(true);
    const timer = setTimeout(() => {
      signal.removeEventListener('abort', onAbort);
      resolve(false);
    }, seconds * 1000);
    const onAbort = () => {
      clearTimeout(timer);
      resolve(true);
    };
    signal.addEventListener('abort', onAbort, { once: true });
  });
}

function checkedUrl(url: string | undefined): string | undefined {
  if (url === undefined) return undefined;
  if (!URL.canParse(url) || !/^https?:$/.test(new URL(url).protocol))
    throw new UsageError(`--webhook: ${JSON.stringify(url)} is not allowed; an http or https URL`);
  return url;
}
