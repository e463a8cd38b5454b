/** Which handler answers a request. */
import type { IncomingMessage } from 'node:http';
import { HttpError } from './error.js';

/** A handler, and the parts of the path that its route leaves open. */
export interface Found<Handler> {
  readonly handler: Handler;
  /** Decoded: one for each `:name` of the route, then those under its `*`. */
  readonly params: readonly string[];
}

interface Route<Handler> {
  readonly parts: readonly string[];
  readonly byMethod: Map<string, Handler>;
}

/** The path of a request, undecoded, and its query. */
export function addressOf({ url = '/' }: IncomingMessage): { path: string; query: URLSearchParams } {
  const at = url.indexOf('?');
  return at < 0
    ? { path: url, query: new URLSearchParams() }
    : { path: url.slice(0, at), query: new URLSearchParams(url.slice(at + 1)) };
}

/**
 * Knows the routes of a server by method and path: `GET /runs`, `POST /runs/:run/halt`, `GET /reader/*`. A `:name` stands for
 * one part of a path, a final `*` for one or more. Of two routes for a path the first one answers, and GET also answers HEAD.
 */
export class Router<Handler> {
  readonly #routes = new Map<string, Route<Handler>>();

  constructor(routes: Readonly<Record<string, Handler>>) {
    for (const [name, handler] of Object.entries(routes)) {
      const [method, path] = name.split(' ');
      const route = this.#routes.get(path) ?? { parts: path.split('/'), byMethod: new Map() };
      this.#routes.set(path, route);
      route.byMethod.set(method, handler);
    }
  }

  /** Throws an `HttpError` with 404 if there is no such path, and with 405 if it has another method. */
  find(method: string | undefined, path: string): Found<Handler> {
    const parts = path.split('/');
    const route = this.#routes.get(path) ?? [...this.#routes.values()].find(({ parts: of }) => matches(of, parts));
    if (!route) throw new HttpError(404, this.#noRoute(), { code: 'unknown_url' });
    const handler = route.byMethod.get(method === 'HEAD' ? 'GET' : (method ?? ''));
    if (!handler) {
      const allow = [...route.byMethod.keys()];
      throw new HttpError(405, `use ${allow.join(' or ')} for this route`, { headers: { allow: allow.join(', ') } });
    }
    const isOpen = (_: string, i: number) => (route.parts[i] ?? '*') === '*' || route.parts[i].startsWith(':');
    return { handler, params: parts.filter(isOpen).map(decode) };
  }

  /** Lists the routes, but for static files. */
  #noRoute(): string {
    const isPage = (path: string) => path === '/' || /\.\w+$/.test(path);
    const all = [...this.#routes].flatMap(([path, { byMethod }]) =>
      isPage(path) ? [] : [...byMethod.keys()].map((method) => `${method} ${path}`),
    );
    return `there is no such route; there are ${all.join(', ')}`;
  }
}

function matches(route: readonly string[], parts: readonly string[]): boolean {
  const isPrefix = route.at(-1) === '*';
  if (isPrefix ? parts.length < route.length : parts.length !== route.length) return false;
  return route.every((part, i) => part === '*' || part.startsWith(':') || part === parts[i]);
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (!(error instanceof URIError)) throw error;
    throw new HttpError(400, 'the path is not valid');
  }
}
