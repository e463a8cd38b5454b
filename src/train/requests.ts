/**
 * What is requested of a run from outside: SIGTERM, SIGINT and SIGHUP, an AbortSignal or .HALT stop it after the step, SIGUSR2
 * saves now, SIGUSR1 dumps where it is. Shortly after the first stop request the handlers are removed, so a second signal
 * ends the process at once.
 */
import { existsSync } from 'node:fs';
import { setTimeout } from 'node:timers/promises';
import { readMark } from '../run/paths.js';
import type { Agreement } from './ranks/agreement.js';

type StopSignal = 'SIGTERM' | 'SIGINT' | 'SIGHUP';

/** The source of signals: `process`, or any event emitter. */
export interface SignalSource {
  /** Calls the handler at each signal of this name. */
  on(signal: string, handler: () => void): unknown;
  /** Removes a handler. */
  off(signal: string, handler: () => void): unknown;
}

/** Where requests come from. */
export interface RequestSources {
  readonly signals: SignalSource | null;
  /** An AbortSignal of the calling program. */
  readonly abort: { readonly aborted: boolean } | undefined;
  /** The path of .HALT; null on ranks that do not look at it. */
  readonly halt: string | null;
  /** Called at SIGUSR1. */
  readonly dump: () => void;
}

/** What is requested between two steps. */
export interface Requests {
  /** The reason in .HALT. */
  readonly halt: string | undefined;
  readonly stop: StopSignal | 'abort' | null;
  readonly save: boolean;
}

/**
 * A terminal sends Ctrl-C to npm and to the program it runs, and npm forwards it to the program: two signals for one
 * request. A signal within this time is such an echo.
 */
const ECHO_MS = 100;
const STOPS = ['abort', 'SIGINT', 'SIGTERM', 'SIGHUP'] as const;

export class RequestWatch {
  readonly #sources: RequestSources;
  readonly #handlers: Readonly<Record<string, () => void>>;
  #stop: StopSignal | null = null;
  #save = false;
  #echoed: Promise<void> = Promise.resolve();

  /** Installs the handlers. */
  constructor(sources: RequestSources) {
    this.#sources = sources;
    this.#handlers = {
      SIGTERM: () => this.#requestStop('SIGTERM'),
      SIGINT: () => this.#requestStop('SIGINT'),
      SIGHUP: () => this.#requestStop('SIGHUP'),
      SIGUSR1: sources.dump,
      SIGUSR2: () => {
        this.#save = true;
      },
    };
    for (const [signal, handler] of Object.entries(this.#handlers)) sources.signals?.on(signal, handler);
  }

  /** Resolves when the handlers are gone: await it before work that a second signal should be able to interrupt. */
  get echoed(): Promise<void> {
    return this.#echoed;
  }

  /** What was requested since the last call. Ranks must act alike: a request to one of them is a request to all. */
  take(agreement: Agreement): Requests {
    const { halt: path, abort } = this.#sources;
    const halt = path !== null && existsSync(path) ? readMark(path) : undefined;
    const stop = this.#stop ?? (abort?.aborted ? 'abort' : null);
    const own = [Number(halt !== undefined), stop === null ? 0 : 1 + STOPS.indexOf(stop), Number(this.#save)];
    this.#save = false;
    const [halts, stops, saves] = agreement.max(own);
    return {
      halt: halts > 0 ? agreement.share(halt ?? '') : undefined,
      stop: stops > 0 ? STOPS[stops - 1] : null,
      save: saves > 0,
    };
  }

  /** Removes the handlers. */
  end(): void {
    for (const [signal, handler] of Object.entries(this.#handlers)) this.#sources.signals?.off(signal, handler);
  }

  #requestStop(signal: StopSignal): void {
    if (this.#stop !== null) return;
    this.#stop = signal;
    this.#echoed = setTimeout(ECHO_MS).then(() => this.end());
  }
}
