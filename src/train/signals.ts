/**
 * Signals to a run: SIGTERM, SIGINT and SIGHUP stop it after the step, SIGUSR2 saves now, SIGUSR1 dumps where it is. Shortly
 * after the first request to stop, the handlers are removed, so a second signal ends the process at once.
 */
import { setTimeout } from 'node:timers/promises';

type StopSignal = 'SIGTERM' | 'SIGINT' | 'SIGHUP';

/** The source of signals: `process`, or any event emitter. */
export interface SignalSource {
  /** Calls the handler at each signal of this name. */
  on(signal: string, handler: () => void): unknown;
  /** Removes a handler. */
  off(signal: string, handler: () => void): unknown;
}

/**
 * A terminal sends Ctrl-C to npm and to the program it runs, and npm forwards it to the program: two signals for one
 * request. A signal within this time is such an echo.
 */
const ECHO_MS = 100;

export class SignalWatch {
  /** Requests by signals. The run reads it between steps, and resets `save`. */
  readonly pending: { stop: StopSignal | null; save: boolean } = { stop: null, save: false };
  readonly #source: SignalSource | null;
  readonly #handlers: Readonly<Record<string, () => void>>;
  #echoed: Promise<void> = Promise.resolve();

  /** Installs the handlers; `dump` is called at SIGUSR1. */
  constructor(source: SignalSource | null, dump: () => void) {
    this.#source = source;
    this.#handlers = {
      SIGTERM: () => this.#requestStop('SIGTERM'),
      SIGINT: () => this.#requestStop('SIGINT'),
      SIGHUP: () => this.#requestStop('SIGHUP'),
      SIGUSR1: dump,
      SIGUSR2: () => {
        this.pending.save = true;
      },
    };
    for (const [signal, handler] of Object.entries(this.#handlers)) source?.on(signal, handler);
  }

  /** Resolves when the handlers are gone: await it before work that a second signal should be able to interrupt. */
  get echoed(): Promise<void> {
    return this.#echoed;
  }

  /** Removes the handlers. */
  end(): void {
    for (const [signal, handler] of Object.entries(this.#handlers)) this.#source?.off(signal, handler);
  }

  #requestStop(signal: StopSignal): void {
    if (this.pending.stop !== null) return;
    this.pending.stop = signal;
    this.#echoed = setTimeout(ECHO_MS).then(() => this.end());
  }
}
