import { readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { testFolder } from '../testing/folder.js';
import { RangeCache } from './range-cache.js';

const folder = testFolder();
const bytes = (value: number, length = 1000) => new Uint8Array(length).fill(value);

describe('the cache of fetched ranges', () => {
  it('fetches once, and again when the kept file is damaged', async () => {
    const path = folder.fresh();
    const cache = new RangeCache(path, 1e6);
    let fetched = 0;
    const get = () =>
      cache.get('key', async () => {
        fetched++;
        return bytes(7);
      });
    expect([...(await get())]).toEqual([...bytes(7)]);
    expect([...(await get())]).toEqual([...bytes(7)]);
    expect(fetched).toBe(1);
    const file = join(path, readdirSync(path)[0]);
    const content = readFileSync(file);
    content[500] ^= 1;
    writeFileSync(file, content);
    expect([...(await get())]).toEqual([...bytes(7)]);
    expect(fetched).toBe(2);
  });

  it('never holds more than its limit for long, and drops what was unused longest', async () => {
    const path = folder.fresh();
    const cache = new RangeCache(path, 20_000);
    for (let key = 0; key < 100; key++) {
      await cache.get(`key ${key}`, async () => bytes(key));
      const total = readdirSync(path).reduce((sum, name) => sum + statSync(join(path, name)).size, 0);
      expect(total).toBeLessThanOrEqual(20_000 + 1032);
    }
    let fetched = 0;
    const count = async () => {
      fetched++;
      return bytes(1);
    };
    await cache.get('key 99', count);
    expect(fetched).toBe(0);
    await cache.get('key 0', count);
    expect(fetched).toBe(1);
  });

  it('keeps nothing when it may not', async () => {
    const path = folder.fresh();
    const cache = new RangeCache(path, 0);
    await cache.get('key', async () => bytes(1));
    expect(readdirSync(path)).toEqual([]);
  });
});
