import { createServer, type RequestListener } from 'node:http';
import type { AddressInfo } from 'node:net';
import { afterEach, describe, expect, it } from 'vitest';
import { hubAccess } from '../../hub/access.js';
import { describeUrl, fetchRange, type HttpOptions } from '../../hub/http.js';
import { type HubServer, type HubServerOptions, startHub } from '../../hub/testing/hub-server.js';
import { DATASET } from '../testing/corpora.js';
import { anyOf, globPattern, type HubRequest, listDataset } from './hub.js';

const http: HttpOptions = { giveUpAfterMs: 5000, stallMs: 1000, firstPauseMs: 5 };
const servers: HubServer[] = [];
afterEach(async () => {
  await Promise.all(servers.splice(0).map((server) => server.close()));
});

async function hub(options: Partial<HubServerOptions> = {}): Promise<HubServer> {
  const bytes = Uint8Array.from({ length: 1000 }, (_, index) => index % 251);
  const names = ['data/a/0.parquet', 'data/b/1.parquet', 'sample/10BT/0.parquet', 'sample/10BT/1.parquet', 'x.json'];
  const server = await startHub({ dataset: DATASET, files: new Map(names.map((name) => [name, bytes])), ...options });
  servers.push(server);
  return server;
}

const README = `---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
# A dataset
`;

async function list(server: HubServer, request: Partial<HubRequest> = {}): Promise<string[]> {
  const access = hubAccess({ HF_ENDPOINT: server.endpoint });
  const full = { dataset: DATASET, configuration: null, split: 'train', revision: 'main', ...request };
  return (await listDataset(full, access, http)).map(({ name }) => name);
}

describe('the files of a dataset', () => {
  it('are those of the configuration, over all pages of the listing', async () => {
    const server = await hub({ readme: README, pageSize: 2 });
    expect(await list(server)).toEqual(['data/a/0.parquet', 'data/b/1.parquet']);
    expect(await list(server, { configuration: 'sample-10BT' })).toEqual([
      'sample/10BT/0.parquet',
      'sample/10BT/1.parquet',
    ]);
  });

  it('are all of them, or a folder, without a card', async () => {
    const server = await hub();
    expect(await list(server)).toHaveLength(4);
    expect(await list(server, { configuration: 'a' })).toEqual(['data/a/0.parquet']);
  });

  it('are the copies that the hub converted where there is no Parquet', async () => {
    const files = new Map([['x.jsonl', Buffer.from('{}')]]);
    const server = await hub({ files, converted: { 'default/train': ['x.jsonl'] } });
    expect((await list(server))[0]).toMatch(/x\.jsonl$/);
  });

  it.each([
    [
      { configuration: 'nope' },
      /data\.hub_config: owner\/corpus has no configuration nope; it has default, sample-10BT/,
    ],
    [{ split: 'test' }, /data\.hub_split: configuration default has no split test; it has train/],
    [{ dataset: 'missing/nothing' }, /data\.hub_dataset: 127\.0\.0\.1.* has no dataset missing\/nothing/],
    [{ dataset: '../etc' }, /data\.hub_dataset: \.\.\/etc is not of the form|has no dataset/],
  ])('are refused by name when they are not there: %j', async (request, message) => {
    const server = await hub({ readme: README });
    await expect(list(server, request)).rejects.toMatchObject({ exitCode: 2, message: expect.stringMatching(message) });
  });
});

describe('HF_ENDPOINT', () => {
  it.each(['nonsense', 'ftp://host', 'https://user:secret@host'])('refuses %s without repeating it', (endpoint) => {
    expect(() => hubAccess({ HF_ENDPOINT: endpoint })).toThrow(/^HF_ENDPOINT: (?!.*secret)/);
  });
});

describe('bytes over HTTP', () => {
  it('come whole, once, from the byte where an answer broke off', async () => {
    const faults = ['truncate', 'drop', 'wrong-range', '503', undefined] as const;
    const server = await hub({ fault: ({ number }) => faults[number] });
    const url = `${server.endpoint}/datasets/${DATASET}/resolve/abcdef0123456789abcdef0123456789abcdef01/x.json`;
    const bytes = await fetchRange(url, { start: 100, end: 900, size: 1000 }, http);
    expect([...bytes]).toEqual(Array.from({ length: 800 }, (_, index) => (index + 100) % 251));
    expect(server.requests.at(-1)).toMatch(/bytes=500-899$/);
    expect(server.requests).toHaveLength(5);
  });

  it('are refused when the file has another size than listed', async () => {
    const server = await hub();
    const url = `${server.endpoint}/datasets/${DATASET}/resolve/abcdef0123456789abcdef0123456789abcdef01/x.json`;
    await expect(fetchRange(url, { start: 0, end: 10, size: 999 }, http)).rejects.toThrow(/1000 bytes now, not 999/);
  });

  it('need a token that goes to its own host only and into no message', async () => {
    const [server, other] = [await hub({ token: 'hf_secret' }), await hub({ token: 'hf_secret' })];
    const credential = { origin: new URL(server.endpoint).origin, token: 'hf_secret' };
    const path = `/datasets/${DATASET}/resolve/abcdef0123456789abcdef0123456789abcdef01/x.json`;
    const range = { start: 0, end: 10, size: 1000 };
    expect(await fetchRange(`${server.endpoint}${path}`, range, { ...http, credential })).toHaveLength(10);
    const refused = await fetchRange(`${other.endpoint}${path}?sig=hf_secret`, range, { ...http, credential }).catch(
      (e) => e,
    );
    expect(refused.message).toMatch(/access refused \(HTTP 401\); set HF_TOKEN/);
    expect(refused.message).not.toContain('hf_secret');
    expect(other.authorizations).toEqual([undefined]);
    expect(describeUrl('https://user:pass@host/a/b?X-Amz-Signature=1')).toBe('host/a/b');
  });

  it('end with code 6 after the time limit, with the last reason', async () => {
    const server = await hub({ fault: () => '503' });
    const url = `${server.endpoint}/datasets/${DATASET}/resolve/abcdef0123456789abcdef0123456789abcdef01/x.json`;
    const started = performance.now();
    const ended = fetchRange(url, { start: 0, end: 10 }, { ...http, giveUpAfterMs: 300 });
    const pattern = /gave nothing for \d+ s \((\d+) attempts?; the last: HTTP status 503\)/;
    await expect(ended).rejects.toMatchObject({ exitCode: 6, message: expect.stringMatching(pattern) });
    expect(performance.now() - started).toBeGreaterThanOrEqual(300);
    // On a busy machine one attempt can take all of the time.
    const attempts = await ended.catch((error: Error) => Number(pattern.exec(error.message)![1]));
    expect(server.requests.length).toBe(attempts);
  });
});

describe('a hub that means harm', () => {
  /** The end of a listing from this server, in words. */
  async function refusal(answer: RequestListener, limit = 300): Promise<string> {
    const server = createServer(answer);
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    const access = hubAccess({ HF_ENDPOINT: `http://127.0.0.1:${(server.address() as AddressInfo).port}` });
    const request = { dataset: DATASET, configuration: null, split: 'train', revision: 'main' };
    const options = { giveUpAfterMs: limit, stallMs: limit, firstPauseMs: 5 };
    try {
      return await listDataset(request, access, options).then(
        (files) => `${files.length} files`,
        (error: Error) => error.message,
      );
    } finally {
      server.closeAllConnections();
      server.close();
    }
  }
  const sha = JSON.stringify({ sha: 'a'.repeat(40) });

  it('cannot lead a listing back to itself', async () => {
    let requests = 0;
    const text = await refusal((request, response) => {
      requests++;
      if (request.url!.includes('/revision/')) response.end(sha);
      else if (request.url!.includes('README')) response.writeHead(404).end();
      else response.setHeader('link', `<${request.url}>; rel="next"`).end('[]');
    });
    expect(text).toContain('leads back to a page of its own');
    expect(requests).toBeLessThan(5);
  });

  it('cannot hold a listing with pages without end, nor with a byte now and then', async () => {
    const started = performance.now();
    let page = 0;
    const endless = await refusal((request, response) => {
      if (request.url!.includes('/revision/')) response.end(sha);
      else if (request.url!.includes('README')) response.writeHead(404).end();
      else response.setHeader('link', `</x/tree/${page++}>; rel="next"`).end('[]');
    });
    expect(endless).toMatch(/more than 1000 pages|not complete after 2 s/);
    const slow = await refusal((_request, response) => {
      const timer = setInterval(() => response.write(' '), 50);
      response.on('close', () => clearInterval(timer));
    });
    expect(slow).toContain('its listing is not complete after 2 s');
    expect(performance.now() - started).toBeLessThan(30_000);
  });

  it('cannot hold a range with a byte now and then', async () => {
    const server = createServer((_request, response) => {
      response.writeHead(206, { 'content-range': 'bytes 0-999999/1000000' });
      const timer = setInterval(() => response.write(' '), 50);
      response.on('close', () => clearInterval(timer));
    });
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}/x`;
    const options = { giveUpAfterMs: 300, stallMs: 300, firstPauseMs: 5 };
    await expect(fetchRange(url, { start: 0, end: 1_000_000 }, options)).rejects.toThrow('bytes per second');
    server.closeAllConnections();
    server.close();
  });

  it('cannot fill the memory with a card', async () => {
    const names = [...'abcdefghij'];
    const lines = names.map((name, i) => `${name}: &${name} [${i === 0 ? 'x' : Array(20).fill(`*${names[i - 1]}`)}]`);
    const text = await refusal((request, response) => {
      if (request.url!.includes('/revision/')) response.end(sha);
      else if (request.url!.includes('README')) response.end(`---\n${lines.join('\n')}\n---\n`);
      else if (request.url!.includes('/tree/')) response.end('[]');
      else response.writeHead(404).end();
    }, 2000);
    expect(text).toContain('has no Parquet files');
  });

  it('cannot hold a run with many patterns and files', () => {
    const slow = Array.from({ length: 1000 }, (_, i) => globPattern(`${'**a'.repeat(300)}${i}`));
    const matches = anyOf(slow, 'owner/name', 200);
    const { user } = process.cpuUsage();
    expect(() => matches('a'.repeat(300))).toThrow(
      'the patterns in the card of owner/name take more than 0.2 s; refused',
    );
    expect(process.cpuUsage().user - user).toBeLessThan(5e6); // half a minute for a single file
  });

  it('is no YAML that its parser would not survive', async () => {
    for (const head of ['['.repeat(1e5), `configs: [${','.repeat(1e5)}]`, `${'- '.repeat(5e4)}"a\n b"`]) {
      const server = await hub({ readme: `---\n${head}\n---\n` });
      expect(await list(server)).toHaveLength(4); // as without a card
    }
  });

  it('cannot hold a run with a pattern', () => {
    const started = performance.now();
    expect(globPattern(`${'*a'.repeat(40)}b`)(`${'a'.repeat(400)}`)).toBe(false);
    expect(globPattern('**/'.repeat(300))('a/'.repeat(2000))).toBe(true);
    expect(performance.now() - started).toBeLessThan(5000);
    expect(() => globPattern('*'.repeat(2000))).toThrow('refused');
  });

  it.each([
    ['data/*.parquet', 'data/a.parquet', true],
    ['data/*.parquet', 'data/a/b.parquet', false],
    ['data/**', 'data/a/b.parquet', true],
    ['**/b.parquet', 'b.parquet', true],
    ['**/b.parquet', 'a/x/b.parquet', true],
    ['a?c', 'abc', true],
    ['a?c', 'a/c', false],
    ['a.c', 'abc', false],
    ['a*', 'a', true],
    ['', '', true],
    ['data/*-0000[1]*', 'data/x-0000[1]y', true],
  ])('reads %j of %j as %j', (pattern, path, matches) => {
    expect(globPattern(pattern)(path)).toBe(matches);
  });
});
