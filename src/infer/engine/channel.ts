/** A queue of events between the engine, which never waits, and one reader. */
export class Channel<Event> implements AsyncIterable<Event> {
  readonly #onReturn: () => void;
  readonly #events: Event[] = [];
  #wake: (() => void) | null = null;
  #isEnded = false;
  #error: unknown = null;

  /** `onReturn` is called when the reader stops before the end. */
  constructor(onReturn: () => void) {
    this.#onReturn = onReturn;
  }

  push(event: Event): void {
    this.#events.push(event);
    this.#wake?.();
  }

  /** No event follows. With an error the reader throws it after the last event. */
  end(error: unknown = null): void {
    this.#isEnded = true;
    this.#error = error;
    this.#wake?.();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Event, void, void> {
    try {
      for (;;) {
        while (this.#events.length > 0) yield this.#events.shift() as Event;
        if (this.#isEnded) break;
        await new Promise<void>((resolve) => {
          this.#wake = resolve;
        });
        this.#wake = null;
      }
      if (this.#error !== null) throw this.#error;
    } finally {
      if (!this.#isEnded) this.#onReturn();
    }
  }
}
