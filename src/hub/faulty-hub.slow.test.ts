import {
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterEach, describe, expect, it } from 'vitest';
import { testFolder } from '../data/testing/folder.js';
import { hubCacheFolder, modelFolder } from './cache.js';
import { parseHubName } from './name.js';
import { type PullOptions, pullModel } from './pull.js';
import { type Fault, type HubModel, type HubServer, SHA, sha256, startHub } from './testing/hub-server.js';
import { index, MODEL, NEEDED, plainModel, shardedModel } from './testing/models.js';

const folder = testFolder();
const servers: HubServer[] = [];
afterEach(async () => {
  await Promise.all(servers.splice(0).map((server) => server.close()));
});

/** Decides about the requests for the weights; the small files always arrive. */
type FaultOfWeights = (number: number) => Fault | undefined;

async function hub(model: HubModel, fault?: FaultOfWeights, token?: string): Promise<HubServer> {
  let number = 0;
  const server = await startHub({
    models: [model],
    ...(fault && { fault: ({ path }) => (path.endsWith('.safetensors') ? fault(number++) : undefined) }),
    ...(token !== undefined && { token }),
  });
  servers.push(server);
  return server;
}

/** A new cache, and a pull into it. */
function client(server: HubServer, environment: Record<string, string> = {}) {
  const home = folder.fresh();
  const env = { HF_HOME: home, HF_ENDPOINT: server.endpoint, ...environment };
  const warnings: string[] = [];
  const pull = (name = `hf:${MODEL}`, options: PullOptions = {}) =>
    pullModel(name, { environment: env, timeout: 1, onWarning: (text) => warnings.push(text), ...options });
  const inside = (...names: string[]) => join(home, 'hub', 'models--owner--small', ...names);
  return { env, home, pull, inside, warnings };
}

function expectFiles(model: HubModel, snapshot: string, names: readonly string[] = NEEDED): void {
  expect(readdirSync(snapshot).sort()).toEqual([...names].sort());
  for (const name of names) expect(readFileSync(join(snapshot, name)).equals(model.files.get(name)!), name).toBe(true);
}

const ofWeights = (server: HubServer) => server.requests.filter((line) => line.includes('.safetensors '));

describe('pullModel', () => {
  it('downloads what a model needs, in the layout of the hub', async () => {
    const model = shardedModel();
    const server = await hub(model);
    const { pull, inside, home } = client(server);
    const progress: [number, number][] = [];
    const pulled = await pull(undefined, { onProgress: (done, total) => progress.push([done, total]) });
    expect(pulled).toMatchObject({
      name: `hf:${MODEL}@${SHA}`,
      commit: SHA,
      folder: inside('snapshots', SHA),
      files: 6,
    });
    expectFiles(model, pulled.folder);
    expect(readFileSync(inside('refs', 'main'), 'utf8')).toBe(SHA);
    // As Python names them: git's SHA-1 of small files (from `git hash-object`), SHA-256 of LFS files.
    expect(readlinkSync(join(pulled.folder, 'generation_config.json'))).toBe(
      '../../blobs/9e26dfeeb6e641a33dae4961196235bdb965b21b',
    );
    const shard = model.files.get('model-00001-of-00002.safetensors')!;
    expect(readlinkSync(join(pulled.folder, 'model-00001-of-00002.safetensors'))).toBe(`../../blobs/${sha256(shard)}`);
    expect(readdirSync(inside('blobs')).some((name) => name.includes('incomplete'))).toBe(false);
    expect(readdirSync(join(home, 'hub', '.locks', 'models--owner--small'))).toHaveLength(6);
    expect(progress.at(-1)).toEqual([pulled.downloaded, pulled.downloaded]);
    expect(pulled.downloaded).toBe(NEEDED.reduce((sum, name) => sum + model.files.get(name)!.length, 0));
  });

  it('downloads nothing that is there, and asks nothing about a whole commit', async () => {
    const server = await hub(shardedModel());
    const { pull } = client(server);
    await pull();
    const asked = server.requests.length;
    expect(await pull()).toMatchObject({ downloaded: 0, commit: SHA });
    expect(server.requests.slice(asked).filter((line) => line.includes('/resolve/'))).toEqual([]);
    const again = server.requests.length;
    expect(await pull(`hf:${MODEL}@${SHA}`)).toMatchObject({ downloaded: 0, commit: SHA });
    expect(server.requests).toHaveLength(again);
  });

  it('follows a branch to its next commit, and downloads only what changed', async () => {
    const first = shardedModel();
    const { env, pull, inside } = client(await hub(first));
    const before = await pull();
    const commit = '1'.repeat(40);
    const next = { ...first, commit, files: new Map([...first.files, ['config.json', Buffer.from('{"a": 1}')]]) };
    const server = await hub(next);
    env.HF_ENDPOINT = server.endpoint;
    const after = await pull();
    expect(after).toMatchObject({ commit, downloaded: 8 });
    expectFiles(next, after.folder);
    expectFiles(first, before.folder);
    expect(readFileSync(inside('refs', 'main'), 'utf8')).toBe(commit);
    expect(ofWeights(server)).toEqual([]);
  });
});

describe('a faulty hub', () => {
  it.each<[string, FaultOfWeights]>([
    ['drops connections', (n) => (n < 3 ? 'drop' : undefined)],
    ['is busy (429)', (n) => (n < 3 ? '429' : undefined)],
    ['is broken for a while (503)', (n) => (n < 2 ? '503' : undefined)],
    ['cuts answers short', (n) => (n < 6 ? 'truncate' : undefined)],
    ['answers with other bytes than asked for', (n) => (n < 2 ? 'wrong-range' : undefined)],
    ['sends more than asked for', () => 'surplus'],
    ['knows no ranges', (n) => (n === 0 ? 'truncate' : 'whole')],
    ['damages a byte once', (n) => (n === 0 ? 'damage' : undefined)],
    ['stalls', (n) => (n < 2 ? 'stall' : undefined)],
    ...[0, 1, 49_999, 65_536, 99_998, 99_999, 100_000].map((at): [string, FaultOfWeights] => [
      `resets at byte ${at}`,
      (n) => (n < 2 ? { resetAfter: at } : undefined),
    ]),
  ])('that %s: the files are right', async (_, fault) => {
    const model = shardedModel();
    const { pull, warnings } = client(await hub(model, fault));
    const { folder: snapshot } = await pull(undefined, { timeout: 5 });
    expectFiles(model, snapshot);
    expect(warnings.length).toBe(fault(0) === 'damage' ? 1 : 0);
  });

  it.each<[string, Fault, RegExp, number]>([
    ['refuses the files', '401', /access refused \(HTTP 401\); set HF_TOKEN/, 2],
    ['has lost a file', '404', /there is no such file \(HTTP 404\)/, 2],
    ['damages every file', 'damage', /does not have the hash that the hub lists, twice; it was removed: check/, 6],
    ['never answers', 'stall', /gave nothing for 1 s.*trefoil pull --timeout/, 6],
    ['is always busy', '429', /gave nothing for 1 s.*HTTP status 429.*trefoil pull --timeout/, 6],
    ['sends a byte now and then', 'slow', /gives less than 1024 bytes per second; use another mirror/, 6],
  ])('that %s: the error says what to do, and no file looks whole', async (_, fault, message, exitCode) => {
    const { pull, inside, env } = client(await hub(shardedModel(), () => fault));
    await expect(pull()).rejects.toMatchObject({ message: expect.stringMatching(message), exitCode });
    expect(readdirSync(inside('snapshots', SHA)).filter((name) => name.endsWith('.safetensors'))).toEqual([]);
    expect(() => modelFolder(`hf:${MODEL}@${SHA}`, env)).toThrow(/not in the cache .*trefoil pull hf:owner\/small@/);
  });

  it('that lists another size than it sends is found out', async () => {
    const model = plainModel();
    const server = await hub(model);
    const { pull } = client(server);
    const { get } = model.files;
    const listed = new Map(model.files);
    // The listing is made from `entries`, the answer from `get`.
    model.files.get = (name) => (name === 'model.safetensors' ? get.call(listed, name)!.subarray(1) : listed.get(name));
    await expect(pull()).rejects.toThrow(/has 99999 bytes now, not 100000 as listed/);
  });

  it.each([401, 403])('that refuses a model (%d) does not say whether it exists', async (status) => {
    const server = await hub(shardedModel(), undefined, 'hf_secret');
    const { pull } = client(server, status === 403 ? { HF_TOKEN: 'hf_other' } : {});
    const error = await pull().catch((e) => e);
    expect(error.message).toMatch(/^hf:owner\/small: 127.*refuses access \(HTTP 401\): check the name; .*set HF_TOKEN/);
    expect(error.message).not.toContain('hf_other');
    expect(error.exitCode).toBe(2);
  });

  it('is reported when it has no such model or revision', async () => {
    const { pull } = client(await hub(shardedModel()));
    await expect(pull('hf:owner/nothing')).rejects.toThrow(
      /has no model owner\/nothing with revision main; check the name/,
    );
    await expect(pull(`hf:${MODEL}@v9`)).rejects.toThrow(/has no model owner\/small with revision v9/);
  });

  it.each<[string, Record<string, Uint8Array>, RegExp]>([
    ['no config.json', { 'model.safetensors': Buffer.from('x') }, /has no config.json; name a model/],
    [
      'other weights',
      { 'config.json': Buffer.from('{}'), 'pytorch_model.bin': Buffer.from('x') },
      /has no model.safetensors, only pytorch_model.bin; choose/,
    ],
    [
      'a missing shard',
      { 'config.json': Buffer.from('{}'), 'model.safetensors.index.json': index({ a: 'b.safetensors' }) },
      /has no b.safetensors, which its model.safetensors.index.json names/,
    ],
    [
      'a shard elsewhere',
      { 'config.json': Buffer.from('{}'), 'model.safetensors.index.json': index({ a: '../b.safetensors' }) },
      /has no weight_map from tensors to .safetensors files/,
    ],
    [
      'an index of 1,001 files',
      {
        'config.json': Buffer.from('{}'),
        'model.safetensors.index.json': index(
          Object.fromEntries(Array.from({ length: 1001 }, (_, i) => [i, `${i}.safetensors`])),
        ),
      },
      /index\.json: names 1001 files, more than the 1000 of any model; use another revision/,
    ],
  ])('is reported when a model has %s', async (_, files, message) => {
    const { pull } = client(await hub({ name: MODEL, files: new Map(Object.entries(files)) }));
    await expect(pull()).rejects.toMatchObject({ message: expect.stringMatching(message), exitCode: 2 });
  });

  it('is reported when it lists a config.json of a terabyte', async () => {
    const listed = (entries: object[]) =>
      entries.map((entry) => ('path' in entry && entry.path === 'config.json' ? { ...entry, size: 1e12 } : entry));
    const server = await hub({ ...plainModel(), listed });
    await expect(client(server).pull()).rejects.toThrow(
      /config\.json has 1000000000000 bytes, more than the 67108864 that are read; name another model/,
    );
  });

  it('may list 300,000 files in one page', async () => {
    const listed = (entries: object[]) => [...entries, ...Array(3e5).fill({ type: '', path: '' })];
    const server = await hub({ ...plainModel(), listed });
    expect((await client(server).pull(undefined, { timeout: 60 })).files).toBe(2);
  });

  it('may redirect to another host, which never gets the token', async () => {
    const model = shardedModel();
    const other = await startHub({ files: model.files });
    servers.push(other);
    const server = await hub(model, () => ({ redirect: other.endpoint }), 'hf_secret');
    const { pull } = client(server, { HF_TOKEN: 'hf_secret' });
    expectFiles(model, (await pull()).folder);
    expect(new Set(server.authorizations)).toEqual(new Set(['Bearer hf_secret']));
    expect(other.requests).toHaveLength(2);
    expect(other.authorizations).toEqual([undefined, undefined]);
  });
});

describe('an interrupted download', () => {
  it('continues where it ended', async () => {
    const model = plainModel();
    const stop = new AbortController();
    const server = await hub(model, (n) => (n === 0 ? 'stall' : undefined)); // after half of the file
    const { pull, inside } = client(server);
    const onProgress = (done: number, total: number) =>
      total > 1000 && done > total / 2 - 10 && stop.abort(new Error('stopped'));
    await expect(pull(undefined, { onProgress, signal: stop.signal, timeout: 60 })).rejects.toThrow('stopped');
    const [partial] = readdirSync(inside('blobs')).filter((name) => name.endsWith('.incomplete'));
    const kept = statSync(inside('blobs', partial)).size;
    expect(kept).toBeGreaterThan(0);
    expectFiles(model, (await pull()).folder, ['config.json', 'model.safetensors']);
    expect(ofWeights(server).at(-1)).toMatch(new RegExp(`bytes=${kept}-99999$`));
  });

  it.each([
    ['garbage', Buffer.alloc(50_000, 1)],
    ['too much', Buffer.alloc(150_000, 1)],
    ['nothing', Buffer.alloc(0)],
  ])('that left %s ends with the right file', async (_, left) => {
    const model = plainModel();
    const { pull, inside } = client(await hub(model));
    mkdirSync(inside('blobs'), { recursive: true });
    const blob = sha256(model.files.get('model.safetensors')!);
    writeFileSync(inside('blobs', `${blob}.incomplete`), left);
    expectFiles(model, (await pull()).folder, ['config.json', 'model.safetensors']);
    expect(readdirSync(inside('blobs'))).toHaveLength(2);
  });

  it('replaces a blob that lost its end, and says so', async () => {
    const model = plainModel();
    const { pull, inside, warnings, env } = client(await hub(model));
    await pull();
    const blob = inside('blobs', sha256(model.files.get('model.safetensors')!));
    rmSync(join(inside('snapshots', SHA), 'model.safetensors'));
    writeFileSync(blob, 'short');
    expect(() => modelFolder(`hf:${MODEL}`, env)).toThrow('its model.safetensors is not in the cache');
    expectFiles(model, (await pull()).folder, ['config.json', 'model.safetensors']);
    expect(warnings.join()).toMatch(/model.safetensors in the cache has another size than on the hub/);
  });

  it('is finished by the one that has the lock; others wait for it and use its file', async () => {
    const model = shardedModel();
    const server = await hub(model, (n) => (n === 0 ? 'stall' : undefined));
    const { pull, warnings } = client(server);
    const pulls = [1, 2, 3].map(() => pull(undefined, { timeout: 5 }));
    for (const { folder: snapshot } of await Promise.all(pulls)) expectFiles(model, snapshot);
    expect(warnings.some((text) => /another process downloads .*: waiting for it/.test(text))).toBe(true);
    // Each shard once, and one of them a second time after the stall.
    expect(ofWeights(server).length).toBeLessThanOrEqual(3);
  });
});

describe('a cache that Python made', () => {
  /** As huggingface_hub 2.0 leaves it: refs, blobs, snapshots with links, a mark of a file that does not exist, listings. */
  function python(model: HubModel, links: boolean) {
    const home = folder.fresh();
    const root = join(home, 'hub', 'models--owner--small');
    const snapshot = join(root, 'snapshots', SHA);
    for (const name of ['refs', 'blobs', 'trees', join('.no_exist', SHA)])
      mkdirSync(join(root, name), { recursive: true });
    mkdirSync(snapshot, { recursive: true });
    writeFileSync(join(root, 'refs', 'main'), SHA);
    writeFileSync(join(home, 'hub', 'CACHEDIR.TAG'), 'Signature: 8a477f597d28d172789f06886806bc55\n');
    writeFileSync(join(root, 'trees', `${SHA}.json`), '[]');
    writeFileSync(join(root, '.no_exist', SHA, 'chat_template.jinja'), '');
    for (const [i, name] of NEEDED.entries()) {
      const target = links ? join(root, 'blobs', `blob${i}`) : join(snapshot, name);
      writeFileSync(target, model.files.get(name)!);
      if (links) symlinkSync(`../../blobs/blob${i}`, join(snapshot, name));
    }
    return { HF_HOME: home, snapshot };
  }

  it.each([true, false])('is used as it is (links: %s), without a network', async (links) => {
    const { snapshot, HF_HOME } = python(shardedModel(), links);
    const environment = { HF_HOME, HF_HUB_OFFLINE: '1', HF_ENDPOINT: 'http://127.0.0.1:9' };
    const pulled = await pullModel(`hf:${MODEL}`, { environment });
    expect(pulled).toEqual({ name: `hf:${MODEL}@${SHA}`, commit: SHA, folder: snapshot, files: 0, downloaded: 0 });
    expect(modelFolder(`hf:${MODEL}`, environment)).toBe(snapshot);
  });

  it.each([true, false])('keeps its files when the hub is asked (links: %s)', async (links) => {
    const model = shardedModel();
    const server = await hub(model);
    const { HF_HOME, snapshot } = python(model, links);
    rmSync(join(snapshot, 'tokenizer.json')); // Python loads a tokenizer separately
    const before = statSync(join(snapshot, NEEDED[2])).ino;
    const pulled = await pullModel(`hf:${MODEL}`, { environment: { HF_HOME, HF_ENDPOINT: server.endpoint } });
    expectFiles(model, pulled.folder);
    expect(statSync(join(snapshot, NEEDED[2])).ino).toBe(before);
    expect(ofWeights(server)).toEqual([]);
  });

  it('is found by the variables of Python', () => {
    expect(hubCacheFolder({ HF_HUB_CACHE: '/a/b', HF_HOME: '/c' })).toBe('/a/b');
    expect(hubCacheFolder({ HUGGINGFACE_HUB_CACHE: '/a/b' })).toBe('/a/b');
    expect(hubCacheFolder({ HF_HOME: '/c', XDG_CACHE_HOME: '/d' })).toBe('/c/hub');
    expect(hubCacheFolder({ XDG_CACHE_HOME: '/d' })).toBe('/d/huggingface/hub');
    expect(hubCacheFolder({ HF_HOME: '~/x' })).toMatch(/^\/.*[^~]\/x\/hub$/);
  });
});

describe('without the hub', () => {
  it('a model that is not in the cache is refused with the remedy', async () => {
    const environment = { HF_HOME: folder.fresh(), HF_HUB_OFFLINE: 'true' };
    await expect(pullModel(`hf:${MODEL}`, { environment })).rejects.toMatchObject({
      message: expect.stringMatching(/^hf:owner\/small: not in the cache .*HF_HUB_OFFLINE is set; unset it/),
      exitCode: 2,
    });
    expect(() => modelFolder(`hf:${MODEL}`, environment)).toThrow('download it with: trefoil pull hf:owner/small');
  });

  it('a model in the cache is used, with a warning, when the hub does not answer', async () => {
    const server = await hub(shardedModel());
    const { pull, warnings } = client(server);
    const { folder: snapshot } = await pull();
    server.dead = true;
    expect(await pull()).toMatchObject({ folder: snapshot, downloaded: 0 });
    expect(warnings.join()).toMatch(
      /gave nothing for 1 s.*; using hf:owner\/small@abc.* from the cache, which may be older/,
    );
  });
});

describe('names of models', () => {
  it.each([
    ['hf:owner/name', 'owner/name', 'main'],
    ['hf:owner/name@v1.0', 'owner/name', 'v1.0'],
    ['hf:o-w_n.er/Name-1.5B@refs/pr/1', 'o-w_n.er/Name-1.5B', 'refs/pr/1'],
  ])('%s', (text, repository, revision) => {
    expect(parseHubName(text)).toEqual({ repository, revision });
  });

  it.each([
    ...['hf:', 'hf:name', 'hf:a/b/c', 'hf:../etc', 'hf:a/..', 'hf:a/b@', 'hf:a/b@../x', 'hf:a/b@x/../y', 'hf:a/b@c@d'],
    ...['hf:a--b/c', 'hf:-a/b', 'hf:a/b.', 'hf:a/b c', 'hf:a/b@/x', 'hf:a\\b/c', 'hf:a/b@.git'],
  ])('%s is refused', (text) => {
    expect(() => parseHubName(text)).toThrow(/^hf:.*: (not a model of the hub; write|.* is not a revision; give)/);
  });
});

it('a pull that is stopped leaves no request behind', async () => {
  const server = await hub(shardedModel(), () => 'stall');
  const { pull } = client(server);
  const stop = new AbortController();
  const pulled = pull(undefined, { signal: stop.signal, timeout: 60 }).catch((error: Error) => error.message);
  while (ofWeights(server).length < 2) await sleep(10);
  stop.abort(new Error('enough'));
  expect(await pulled).toBe('enough');
});
