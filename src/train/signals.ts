/**
 * What signals ask of a run: SIGTERM and SIGINT to stop after the step, SIGUSR2 to save now, SIGUSR1 to dump where it
 * is. A moment after the first stop request the handlers are gone, so a second one ends the process at once.
 */
import { setTimeout } from 'node:timers/promises';

export type StopSignal = 'SIGTERM' | 'SIGINT';

/** Where signals come from: `process`, or any event emitter. */
export interface SignalSource {
  on(signal: string, handler: () => void): unknown;
  off(signal: string, handler: () => void): unknown;
}

export interface SignalRequests {
  stop: StopSignal | null;
  save: boolean;
  /** After a stop request: wait for this before anything that a second signal should be able to cut short. */
  echoed: Promise<void>;
}

export interface SignalWatch {
  readonly requests: SignalRequests;
  end(): void;
}

/**
 * A terminal sends Ctrl-C to npm and to the program under it, and npm passes it on to the program: two signals, one
 * wish. What follows so closely is such an echo and no second request.
 */
const ECHO_MS = 100;

export function watchSignals(dump: () => void, source: SignalSource = process): SignalWatch {
  const requests: SignalRequests = { stop: null, save: false, echoed: Promise.resolve() };
  const stop = (signal: StopSignal) => () => {
    if (requests.stop !== null) return;
    requests.stop = signal;
    requests.echoed = setTimeout(ECHO_MS).then(end);
  };
  const handlers: (readonly [string, () => void])[] = [
    ['SIGTERM', stop('SIGTERM')],
    ['SIGINT', stop('SIGINT')],
    ['SIGUSR1', dump],
    [
      'SIGUSR2',
      () => {
        requests.save = true;
      },
    ],
  ];
  const end = () => {
    for (const [signal, handler] of handlers) source.off(signal, handler);
  };
  for (const [signal, handler] of handlers) source.on(signal, handler);
  return { requests, end };
}
