/** Lets the event loop run: events that have arrived are handled before the code goes on. */

/** A page has no `setImmediate`, and delays its timers by milliseconds; a message to oneself is handled at once. */
const next: (callback: () => void) => void = typeof setImmediate === 'function' ? setImmediate : inPage();

export function turn(): Promise<void> {
  return new Promise((resolve) => next(resolve));
}

/** The part of a page's message channel that is used: Node's has other types. */
interface Channel {
  readonly port1: { onmessage: (() => void) | null };
  readonly port2: { postMessage(message: null): void };
}

function inPage(): (callback: () => void) => void {
  const { port1, port2 } = new MessageChannel() as unknown as Channel;
  const waiting: (() => void)[] = [];
  port1.onmessage = () => waiting.shift()?.();
  return (callback) => {
    waiting.push(callback);
    port2.postMessage(null);
  };
}
