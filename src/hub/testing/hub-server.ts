/** A server that speaks the part of the hub's API that Trefoil uses, and can misbehave in every way of a network. */

import { createHash } from 'node:crypto';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';

export type Fault =
  | 'drop'
  | '401'
  | '404'
  | '429'
  | '503'
  | 'truncate'
  | 'stall'
  | 'wrong-range'
  /** A byte is changed. */
  | 'damage'
  /** Each answer has further bytes behind its end. */
  | 'surplus'
  /** The whole file, whatever was asked for. */
  | 'whole'
  /** A byte now and then. */
  | 'slow'
  /** The connection is reset after this many bytes. */
  | { readonly resetAfter: number }
  /** Sent to this address instead. */
  | { readonly redirect: string };

/** A model: its weights are LFS files, as on the hub. */
export interface HubModel {
  /** owner/name */
  readonly name: string;
  readonly files: ReadonlyMap<string, Uint8Array>;
  /** The commit of the branch `main`. */
  readonly commit?: string;
  /** Changes the listing of its files. */
  listed?(entries: object[]): object[];
}

export interface HubServerOptions {
  readonly dataset?: string;
  readonly files?: ReadonlyMap<string, Uint8Array>;
  readonly models?: readonly HubModel[];
  readonly readme?: string;
  /** Decides about each request for bytes of a file. */
  fault?(request: { path: string; number: number }): Fault | undefined;
  /** Refuse requests without this bearer token. */
  readonly token?: string;
  /** Files per page of a listing. */
  readonly pageSize?: number;
  /** Files of other formats: what the hub has converted, by configuration and split. */
  readonly converted?: Readonly<Record<string, readonly string[]>>;
}

export interface HubServer {
  readonly endpoint: string;
  /** Every request as `METHOD path range`. */
  readonly requests: string[];
  /** Bytes of files sent. */
  bytes: number;
  /** All requests fail from here on. */
  dead: boolean;
  /** Nothing is here any more: all requests get 404. */
  missing: boolean;
  readonly authorizations: (string | undefined)[];
  close(): Promise<void>;
}

export const SHA = 'abcdef0123456789abcdef0123456789abcdef01';

export async function startHub(options: HubServerOptions): Promise<HubServer> {
  const sockets = new Set<Socket>();
  let fileRequests = 0;
  const hub = {
    requests: [] as string[],
    authorizations: [] as (string | undefined)[],
    bytes: 0,
    dead: false,
    missing: false,
  };
  const server = createServer((request, response) => {
    hub.requests.push(`${request.method} ${request.url} ${request.headers.range ?? ''}`.trim());
    hub.authorizations.push(request.headers.authorization);
    if (hub.dead) return request.socket.destroy();
    if (hub.missing) return plain(response, 404, 'not here');
    if (options.token !== undefined && request.headers.authorization !== `Bearer ${options.token}`)
      return plain(response, 401, 'who are you?');
    answer(request, response);
  });
  server.on('connection', (socket) => {
    sockets.add(socket);
    socket.on('close', () => sockets.delete(socket));
  });

  function answer(request: IncomingMessage, response: ServerResponse) {
    const url = new URL(request.url!, 'http://hub');
    for (const model of options.models ?? [])
      if (new RegExp(`^(/api/models)?/${model.name}/`).test(url.pathname))
        return ofModel(model, url, request, response);
    if (url.pathname.startsWith('/cdn/')) {
      const path = url.pathname.slice('/cdn/'.length);
      const content = options.files?.get(path);
      return content ? sendRange(request, response, path, content) : plain(response, 404, 'not here');
    }
    const api = `/api/datasets/${options.dataset}`;
    const files = `/datasets/${options.dataset}/resolve/${SHA}/`;
    if (url.pathname.startsWith(`${api}/revision/`)) return json(response, { sha: SHA });
    if (url.pathname === `${api}/tree/${SHA}`) return listTree(url, response);
    if (url.pathname.startsWith(`${api}/parquet/`)) {
      const list = options.converted?.[url.pathname.slice(`${api}/parquet/`.length)];
      return list
        ? json(
            response,
            list.map((name) => `${hubObject.endpoint}${files}${name}`),
          )
        : plain(response, 404, '');
    }
    if (!url.pathname.startsWith(files)) return plain(response, 404, 'not here');
    const name = decodeURIComponent(url.pathname.slice(files.length));
    if (name === 'README.md') return plain(response, options.readme === undefined ? 404 : 200, options.readme ?? '');
    const content = options.files?.get(name);
    if (content === undefined) return plain(response, 404, 'not here');
    sendRange(request, response, name, content);
  }

  function ofModel(
    { name, files, commit = SHA, listed = (entries) => entries }: HubModel,
    url: URL,
    request: IncomingMessage,
    response: ServerResponse,
  ) {
    const { pathname } = url;
    const revision = /\/revision\/([^/]+)$/.exec(pathname)?.[1];
    if (revision !== undefined)
      return [commit, 'main'].includes(revision) ? json(response, { sha: commit }) : plain(response, 404, 'not here');
    if (pathname === `/api/models/${name}/tree/${commit}`) return json(response, listed([...files].map(treeEntry)));
    const start = `/${name}/resolve/${commit}/`;
    const path = decodeURIComponent(pathname.slice(start.length));
    const content = pathname.startsWith(start) ? files.get(path) : undefined;
    if (content === undefined) return plain(response, 404, 'not here');
    sendRange(request, response, path, content);
  }

  function listTree(url: URL, response: ServerResponse): void {
    const all = [...options.files!].map(([path, bytes]) => ({
      type: 'file',
      path,
      size: bytes.length,
      oid: 'pointer',
      lfs: { oid: sha256(bytes), size: bytes.length },
    }));
    const page = options.pageSize ?? all.length;
    const from = Number(url.searchParams.get('cursor') ?? 0);
    if (from + page < all.length) {
      url.searchParams.set('cursor', String(from + page));
      response.setHeader('link', `<${hubObject.endpoint}${url.pathname}${url.search}>; rel="next"`);
    }
    json(response, [{ type: 'directory', path: 'data', oid: 'x', size: 0 }, ...all.slice(from, from + page)]);
  }

  function sendRange(request: IncomingMessage, response: ServerResponse, path: string, content: Uint8Array) {
    const asked = /^bytes=(\d+)-(\d+)$/.exec(request.headers.range ?? '');
    const [start, end] = asked ? [Number(asked[1]), Number(asked[2]) + 1] : [0, content.length];
    const fault = options.fault?.({ path, number: fileRequests++ });
    if (fault === 'drop') return void request.socket.destroy();
    if (fault === '401' || fault === '404') return plain(response, Number(fault), 'no');
    if (typeof fault === 'object' && 'redirect' in fault)
      return void response.writeHead(302, { location: `${fault.redirect}/cdn/${path}` }).end();
    if (fault === 'whole') return void response.writeHead(200, { 'content-length': content.length }).end(content);
    if (fault === '429') return plain(response.setHeader('retry-after', '0'), 429, 'slow down');
    if (fault === '503') return plain(response, 503, 'later');
    let body = content.subarray(start, end);
    if (fault === 'damage') body = body.map((byte, i) => (i === body.length >> 1 ? byte ^ 1 : byte));
    if (fault === 'surplus') body = Buffer.concat([body, Buffer.from('further bytes')]);
    const named = fault === 'wrong-range' ? start + 1 : start;
    response.writeHead(asked ? 206 : 200, {
      'content-length': body.length,
      ...(asked && { 'content-range': `bytes ${named}-${end - 1}/${content.length}` }),
    });
    if (fault === 'truncate' || fault === 'stall') {
      const half = body.subarray(0, body.length >> 1);
      response.write(half);
      hub.bytes += half.length;
      if (fault === 'truncate') setTimeout(() => request.socket.destroy(), 5);
      return; // a stalled answer just never goes on
    }
    if (fault === 'slow') {
      const timer = setInterval(() => response.write(body.subarray(0, 1)), 50);
      return void response.on('close', () => clearInterval(timer));
    }
    if (typeof fault === 'object' && 'resetAfter' in fault) {
      const part = body.subarray(0, fault.resetAfter);
      hub.bytes += part.length;
      return void response.write(part, () => request.socket.resetAndDestroy());
    }
    hub.bytes += body.length;
    response.end(body);
  }

  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as AddressInfo;
  const hubObject = Object.assign(hub, {
    endpoint: `http://127.0.0.1:${port}`,
    close: () =>
      new Promise<void>((resolve) => {
        for (const socket of sockets) socket.destroy();
        server.close(() => resolve());
      }),
  });
  return hubObject;
}

function treeEntry([path, bytes]: [string, Uint8Array]): object {
  const pointer = createHash('sha1').update(`blob ${bytes.length}\0`).update(bytes).digest('hex');
  const entry = { type: 'file', path, size: bytes.length, oid: pointer };
  const isLfs = path.endsWith('.safetensors');
  return isLfs ? { ...entry, oid: '0'.repeat(40), lfs: { oid: sha256(bytes), size: bytes.length } } : entry;
}

export function sha256(bytes: Uint8Array): string {
  return createHash('sha256').update(bytes).digest('hex');
}

function json(response: ServerResponse, value: unknown): void {
  response.writeHead(200, { 'content-type': 'application/json' });
  response.end(JSON.stringify(value));
}

function plain(response: ServerResponse, status: number, text: string): void {
  response.writeHead(status, { 'content-type': 'text/plain' });
  response.end(text);
}
