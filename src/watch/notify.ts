/** Delivers alerts to a command or a webhook, with time limits, so that neither can block the watchdog. */
import { spawn } from 'node:child_process';
import type { RuleRow } from './row.js';

export interface Alert extends RuleRow {
  readonly run: string;
  readonly rank: number;
  readonly line: string;
  /** Time of the alert, ISO 8601. */
  readonly iso: string;
}

export interface Channels {
  readonly command?: string | undefined;
  readonly webhook?: string | undefined;
}

const COMMAND_LIMIT_MS = 30_000;
const WEBHOOK_LIMIT_MS = 10_000;

/** Resolves when all channels have been tried; reports failures to `onProblem`. */
export async function notify(
  alert: Alert,
  { command, webhook }: Channels,
  onProblem: (line: string) => void,
): Promise<void> {
  await Promise.all([
    command === undefined ? undefined : runCommand(command, alert, onProblem),
    webhook === undefined ? undefined : post(webhook, alert, onProblem),
  ]);
}

/** Runs the command with the alert in environment variables and as JSON on stdin. */
function runCommand(command: string, alert: Alert, onProblem: (line: string) => void): Promise<void> {
  return new Promise((resolve) => {
    const child = spawn('/bin/sh', ['-c', command], {
      env: {
        ...process.env,
        TREFOIL_ALERT_RUN: alert.run,
        TREFOIL_ALERT_RULE: alert.rule,
        TREFOIL_ALERT_LEVEL: alert.level,
        TREFOIL_ALERT_LINE: alert.line,
      },
      stdio: ['pipe', 'ignore', 'inherit'],
      timeout: COMMAND_LIMIT_MS,
      killSignal: 'SIGKILL',
    });
    child.stdin.on('error', () => {}); // the command need not read its stdin
    child.stdin.end(`${JSON.stringify(alert)}\n`);
    child.once('error', (error) => {
      onProblem(`the alert command could not be started: ${error.message}`);
      resolve();
    });
    child.once('close', (code, signal) => {
      if (code !== 0) onProblem(`the alert command exited with ${signal ?? `code ${code}`}`);
      resolve();
    });
  });
}

async function post(url: string, alert: Alert, onProblem: (line: string) => void): Promise<void> {
  try {
    const response = await fetch(url, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(alert),
      signal: AbortSignal.timeout(WEBHOOK_LIMIT_MS),
      redirect: 'error',
    });
    await response.body?.cancel();
    if (!response.ok) onProblem(`the webhook answered ${response.status}`);
  } catch (error) {
    const { message, cause } = error as Error;
    onProblem(`the webhook could not be reached: ${cause instanceof Error ? cause.message : message}`);
  }
}
