/** The files of the web application, which scripts/build.mjs bundles into dist/dashboard/web. */
import { existsSync, readFileSync } from 'node:fs';
import { UsageError } from '../errors.js';

export interface Asset {
  readonly type: string;
  readonly content: Buffer;
}

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

export function loadAssets(): ReadonlyMap<string, Asset> {
  const folder = webFolder();
  const assets = new Map<string, Asset>();
  for (const [path, { file, type }] of Object.entries(FILES)) {
    const url = new URL(file, folder);
    if (!existsSync(url)) throw new UsageError('the pages of the dashboard are not built; run npm run build');
    assets.set(path, { type, content: readFileSync(url) });
  }
  return assets;
}
