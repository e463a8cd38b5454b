/**
 * Requests to a run from signals: SIGTERM, SIGINT and SIGHUP stop it after the step, SIGUSR2 saves now, SIGUSR1 dumps where it is.
 * Shortly after the first stop request the handlers are removed, so a second signal ends the process at once.
 */
import { setTimeout } from 'node:timers/promises';

export type StopSignal = 'SIGTERM' | 'SIGINT' | 'SIGHUP';

/** The source of signals: `process`, or any event emitter. */
export interface SignalSource {
  /** Calls the handler at each signal of this name. */
  on(signal: string, handler: () => void): unknown;
  /** Removes a handler. */
  off(signal: string, handler: () => void): unknown;
}

export interface SignalRequests {
  stop: StopSignal | null;
  save: boolean;
  /** Resolves when the handlers are gone: await it before work that a second signal should be able to interrupt. */
  echoed: Promise<void>;
}

export interface SignalWatch {
  readonly requests: SignalRequests;
  end(): void;
}

/**
 * A terminal sends Ctrl-C to npm and to the program it runs, and npm forwards it to the program: two signals for one
 * request. A signal within this time is such an echo.
 */
const ECHO_MS = 100;

/** Without a source nothing is ever requested. */
export function watchSignals(dump: () => void, source: SignalSource | null): SignalWatch {
  const requests: SignalRequests = { stop: null, save: false, echoed: Promise.resolve() };
  const stop = (signal: StopSignal) => () => {
    if (requests.stop !== null) return;
    requests.stop = signal;
    requests.echoed = setTimeout(ECHO_MS).then(end);
  };
  const handlers: (readonly [string, () => void])[] = [
    ['SIGTERM', stop('SIGTERM')],
    ['SIGINT', stop('SIGINT')],
    ['SIGHUP', stop('SIGHUP')],
    ['SIGUSR1', dump],
    [
      'SIGUSR2',
      () => {
        requests.save = true;
      },
    ],
  ];
  const end = () => {
    for (const [signal, handler] of handlers) source?.off(signal, handler);
  };
  for (const [signal, handler] of handlers) source?.on(signal, handler);
  return { requests, end };
}
