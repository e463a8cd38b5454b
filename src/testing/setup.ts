/** Between two tests the worker listens to vitest: tests that wait for a child in one go would starve it, and it gives up after a minute. */
import { setImmediate } from 'node:timers/promises';
import { afterEach } from 'vitest';

afterEach(async () => {
  await setImmediate();
});
