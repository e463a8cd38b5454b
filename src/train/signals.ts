/**
 * Requests to a run from signals: SIGTERM, SIGINT and SIGHUP stop it after the step, SIGUSR2 saves now, SIGUSR1 dumps where it is.
 * Shortly after the first stop request the handlers are removed, so a second signal ends the process at once.
 */
import { setTimeout } from 'node:timers/promises';
import type { Agreement } from './ranks/agreement.js';

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

/** What is requested between two steps, from signals, the calling program and .HALT. */
export interface StopRequests {
  /** The reason in .HALT; only rank 0 reads it. */
  readonly halt: string | undefined;
  readonly stop: StopSignal | 'abort' | null;
  readonly save: boolean;
}

const STOPS = ['abort', 'SIGINT', 'SIGTERM', 'SIGHUP'] as const;

/** Ranks must act alike at the same step: a request to one rank is a request to all. */
export function agreeOnRequests(own: StopRequests, agreement: Agreement): StopRequests {
  const stop = own.stop === null ? 0 : 1 + STOPS.indexOf(own.stop);
  const [halts, stops, saves] = agreement.max([Number(own.halt !== undefined), stop, Number(own.save)]);
  return {
    halt: halts > 0 ? agreement.share(own.halt ?? '') : undefined,
    stop: stops > 0 ? STOPS[stops - 1] : null,
    save: saves > 0,
  };
}
