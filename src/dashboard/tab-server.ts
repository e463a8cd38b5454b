/** Serves the page that trains in a browser's tab: files only, with the headers that let its threads share memory. */
import { existsSync, readFileSync } from 'node:fs';
import type { ServerResponse } from 'node:http';
import { UsageError } from '../errors.js';
import { sendError } from '../http/answer.js';
import { asHttpError, HttpError } from '../http/error.js';
import { listen } from '../http/listen.js';
import { addressOf, Router } from '../http/router.js';
import { HEADERS, isOwnHost } from './security.js';

const TYPES = {
  html: 'text/html; charset=utf-8',
  js: 'text/javascript; charset=utf-8',
  css: 'text/css; charset=utf-8',
  svg: 'image/svg+xml',
  wasm: 'application/wasm',
  json: 'application/json',
} as const;

const PAGE = ['index.html', 'page.js', 'worker.js', 'page.css', 'favicon.svg'] as const;
const KERNELS = ['kernels-fma.wasm', 'kernels.wasm', 'kernels.json'] as const;

/** Kernels are compiled; helpers are workers whose code is in the bundle. Nothing from elsewhere, and nothing goes there. */
const CONTENT_SECURITY_POLICY = [
  "default-src 'none'",
  "script-src 'self' 'wasm-unsafe-eval'",
  "style-src 'self' 'unsafe-inline'",
  "img-src 'self' data:",
  "connect-src 'self'",
  "worker-src 'self' blob:",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
].join('; ');

/** With these two a page is cross-origin isolated: without them it has one thread. */
const ISOLATION = { 'Cross-Origin-Opener-Policy': 'same-origin', 'Cross-Origin-Embedder-Policy': 'require-corp' };

export interface TabServerOptions {
  readonly host: string;
  /** 0 takes a free port. */
  readonly port: number;
  /** False leaves the headers out, as many file servers do. */
  readonly isIsolated?: boolean;
  /** Folder of the page. Default: the one that `npm run build` fills. */
  readonly page?: URL;
}

export interface TabServer {
  readonly url: string;
  close(): Promise<void>;
}

export async function serveTab({ host, port, isIsolated = true, page }: TabServerOptions): Promise<TabServer> {
  const isSource = import.meta.url.endsWith('.ts');
  const folder = page ?? new URL(isSource ? '../../dist/page/' : '../page/', import.meta.url);
  const files = [
    ...PAGE.map((name) => [name, new URL(name, folder)] as const),
    ...KERNELS.map((name) => [name, new URL(`../device/wasm/${name}`, import.meta.url)] as const),
  ];
  const { 'Cross-Origin-Opener-Policy': _, ...common } = HEADERS;
  const headers = { ...common, 'Content-Security-Policy': CONTENT_SECURITY_POLICY, ...(isIsolated && ISOLATION) };
  const routes = new Router<(response: ServerResponse) => void>(
    Object.fromEntries(
      files.map(([name, url]) => {
        if (!existsSync(url)) throw new UsageError(`the page is not built (${name} is missing); run npm run build`);
        const content = readFileSync(url);
        const type = TYPES[name.split('.').at(-1) as keyof typeof TYPES];
        const answer = (response: ServerResponse) =>
          void response
            .writeHead(200, { ...headers, 'Content-Type': type, 'Content-Length': String(content.length) })
            .end(content);
        return [`GET /${name === 'index.html' ? '' : name}`, answer];
      }),
    ),
  );
  const { server, url } = await listen(
    (request, response) => {
      try {
        if (!isOwnHost(request.headers.host, host))
          throw new HttpError(421, 'the Host header does not name this server');
        routes.find(request.method, addressOf(request).path).handler(response);
      } catch (error) {
        const shown = asHttpError(error);
        sendError(request, response, shown, { error: shown.message });
      }
    },
    host,
    port,
  );
  const close = () =>
    new Promise<void>((resolve) => {
      server.close(() => resolve());
      server.closeAllConnections();
    });
  return { url, close };
}
