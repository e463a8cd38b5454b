import { EventEmitter } from 'node:events';
import { describe, expect, it } from 'vitest';
import { SingleAgreement } from './ranks/agreement.js';
import { RequestWatch } from './requests.js';

function watched() {
  const source = new EventEmitter();
  const dumps: string[] = [];
  const abort = { aborted: false };
  const watch = new RequestWatch({ signals: source, abort, halt: null, dump: () => dumps.push('dump') });
  return { source, dumps, abort, watch, take: () => watch.take(new SingleAgreement()) };
}

describe('requests', () => {
  it.each(['SIGTERM', 'SIGINT', 'SIGHUP'] as const)(
    '%s asks to stop, and its echo through npm is the same wish',
    async (name) => {
      const { source, watch, take } = watched();
      source.emit(name);
      expect(take()).toEqual({ halt: undefined, stop: name, save: false });
      // As long as there is a handler, Node does not end the process.
      expect(source.listenerCount(name)).toBe(1);
      source.emit(name);
      expect(take().stop).toBe(name);
      await watch.echoed;
      expect(source.eventNames()).toEqual([]); // from here on a signal ends the process at once
    },
  );

  it('SIGUSR2 asks for one checkpoint, SIGUSR1 for a dump; both go on', () => {
    const { source, dumps, watch, take } = watched();
    source.emit('SIGUSR2');
    source.emit('SIGUSR1');
    expect(take()).toEqual({ halt: undefined, stop: null, save: true });
    expect(take().save).toBe(false);
    expect(dumps).toEqual(['dump']);
    watch.end();
    expect(source.eventNames()).toEqual([]);
  });

  it('an aborted AbortSignal asks to stop', () => {
    const { abort, take } = watched();
    expect(take().stop).toBeNull();
    abort.aborted = true;
    expect(take().stop).toBe('abort');
  });
});
