import { EventEmitter } from 'node:events';
import { describe, expect, it } from 'vitest';
import { SignalWatch } from './signals.js';

function watched() {
  const source = new EventEmitter();
  const dumps: string[] = [];
  const watch = new SignalWatch(source, () => dumps.push('dump'));
  return { source, dumps, watch };
}

describe('signals', () => {
  it.each(['SIGTERM', 'SIGINT', 'SIGHUP'] as const)(
    '%s requests a stop, and its echo through npm is the same request',
    async (name) => {
      const { source, watch } = watched();
      source.emit(name);
      expect(watch.pending).toEqual({ stop: name, save: false });
      // As long as there is a handler, Node does not end the process.
      expect(source.listenerCount(name)).toBe(1);
      source.emit(name);
      expect(watch.pending.stop).toBe(name);
      await watch.echoed;
      expect(source.eventNames()).toEqual([]); // from here on a signal ends the process at once
    },
  );

  it('SIGUSR2 requests a checkpoint, SIGUSR1 a dump; neither stops', () => {
    const { source, dumps, watch } = watched();
    source.emit('SIGUSR2');
    source.emit('SIGUSR1');
    expect(watch.pending).toEqual({ stop: null, save: true });
    expect(dumps).toEqual(['dump']);
    watch.end();
    expect(source.eventNames()).toEqual([]);
  });
});
