import { EventEmitter } from 'node:events';
import { describe, expect, it } from 'vitest';
import { watchSignals } from './signals.js';

function watched() {
  const source = new EventEmitter();
  const dumps: string[] = [];
  return { source, dumps, watch: watchSignals(() => dumps.push('dump'), source) };
}

describe('signals', () => {
  it.each(['SIGTERM', 'SIGINT'] as const)(
    '%s asks to stop, and its echo through npm is the same wish',
    async (name) => {
      const { source, watch } = watched();
      source.emit(name);
      expect(watch.requests.stop).toBe(name);
      // As long as there is a handler, Node does not end the process.
      expect(source.listenerCount(name)).toBe(1);
      source.emit(name);
      expect(watch.requests.stop).toBe(name);
      await watch.requests.echoed;
      expect(source.eventNames()).toEqual([]); // from here on a signal ends the process at once
    },
  );

  it('SIGUSR2 asks for a checkpoint, SIGUSR1 for a dump; both go on', () => {
    const { source, dumps, watch } = watched();
    source.emit('SIGUSR2');
    source.emit('SIGUSR1');
    expect(watch.requests).toMatchObject({ stop: null, save: true });
    expect(dumps).toEqual(['dump']);
    watch.end();
    expect(source.eventNames()).toEqual([]);
  });
});
