/** Two servers that claim the same identity of different files: the bytes of one are not used for the other. */
import { expect, it } from 'vitest';
import { startHub } from '../../hub/testing/hub-server.js';
import { DATASET } from '../testing/corpora.js';
import { testFolder } from '../testing/folder.js';
import { BlobOpener } from './blob.js';

const folder = testFolder();
const http = { giveUpAfterMs: 5000, stallMs: 1000, firstPauseMs: 5 };

it('a server cannot put bytes into the cache of another, and what does not parse is fetched again', async () => {
  const servers = await Promise.all(
    [1, 2].map((value) =>
      startHub({ dataset: DATASET, files: new Map([['a.parquet', new Uint8Array(100).fill(value)]]) }),
    ),
  );
  const cache = { folder: folder.fresh(), limitBytes: 1e6 };
  const open = (endpoint: string) =>
    new BlobOpener({ http, cache }).open({
      kind: 'parquet',
      name: 'a.parquet',
      location: `${endpoint}/datasets/${DATASET}/resolve/abcdef0123456789abcdef0123456789abcdef01/a.parquet`,
      size: 100,
      identity: 'the same',
      parts: 2,
    });
  try {
    const [first, second] = await Promise.all(servers.map(({ endpoint }) => open(endpoint)));
    expect([...(await first.read(0, 3))]).toEqual([1, 1, 1]);
    expect([...(await second.read(0, 3))]).toEqual([2, 2, 2]);
    expect([...(await first.read(0, 3))]).toEqual([1, 1, 1]);
    const asked = servers[0].requests.length;
    await first.forget!();
    expect([...(await first.read(0, 3))]).toEqual([1, 1, 1]);
    expect(servers[0].requests).toHaveLength(asked + 1);
  } finally {
    await Promise.all(servers.map((server) => server.close()));
  }
});
