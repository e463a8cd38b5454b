/** The files of the web application, which scripts/build.mjs bundles into dist/dashboard/web. */
import { existsSync, readFileSync } from 'node:fs';
import { UsageError } from '../errors.js';
import type { ServedPage } from '../serve/options.js';
import { HEADERS } from './security.js';

/** Features of the server behind the pages: runs, a model, a key that requests to the model need. */
export type PageFeature = 'runs' | 'model' | 'key';

/** By path of the URL. */
const FILES: Readonly<Record<string, { readonly file: string; readonly type: string }>> = {
  '/': { file: 'index.html', type: 'text/html; charset=utf-8' },
  '/app.js': { file: 'app.js', type: 'text/javascript; charset=utf-8' },
  '/app.css': { file: 'app.css', type: 'text/css; charset=utf-8' },
  '/favicon.svg': { file: 'favicon.svg', type: 'image/svg+xml' },
};

/** The folder of the bundle: beside the compiled module, or in dist/ if Trefoil runs from sources. */
export function webFolder(): URL {
  const isSource = import.meta.url.endsWith('.ts');
  return new URL(isSource ? '../../dist/dashboard/web/' : './web/', import.meta.url);
}

/** The pages of a server. They read `parts` from a meta element: a request that fails would be an error in the console. */
export function loadAssets(parts: readonly PageFeature[]): ReadonlyMap<string, ServedPage> {
  const folder = webFolder();
  const assets = new Map<string, ServedPage>();
  for (const [path, { file, type }] of Object.entries(FILES)) {
    const url = new URL(file, folder);
    if (!existsSync(url)) throw new UsageError('the pages of the dashboard are not built; run npm run build');
    const bytes = readFileSync(url);
    const content = path === '/' ? Buffer.from(bytes.toString().replace('PARTS', parts.join(' '))) : bytes;
    const headers = { ...HEADERS, 'Content-Type': type, 'Content-Length': String(content.length) };
    assets.set(path, { headers, content });
  }
  return assets;
}
