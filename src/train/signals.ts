/**
 * What signals ask of a run: SIGTERM and SIGINT to stop after the step, SIGUSR2 to save now, SIGUSR1 to dump where it
 * is. After the first stop request the handlers are gone, so a second one ends the process at once.
 */
export interface SignalRequests {
  stop: NodeJS.Signals | null;
  save: boolean;
}

export interface SignalWatch {
  readonly requests: SignalRequests;
  end(): void;
}

type Handler = readonly [NodeJS.Signals, () => void];

export function watchSignals(dump: () => void, emitter: NodeJS.EventEmitter = process): SignalWatch {
  const requests: SignalRequests = { stop: null, save: false };
  const stop = (signal: NodeJS.Signals) => () => {
    requests.stop = signal;
    end();
  };
  const handlers: Handler[] = [
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
    for (const [signal, handler] of handlers) emitter.off(signal, handler);
  };
  for (const [signal, handler] of handlers) emitter.on(signal, handler);
  return { requests, end };
}
