// Makes the screenshots of the dashboard in docs/images, from example runs: node scripts/dashboard-images.mjs
// Needs a build (npm run build) and Chromium.
import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const folder = mkdtempSync(join(tmpdir(), 'trefoil-images-'));
const bundle = join(folder, 'example-run.mjs');
await build({
  entryPoints: [join(root, 'src/dashboard/testing/example-run.ts')],
  ...{ bundle: true, platform: 'node', format: 'esm', outfile: bundle, logLevel: 'error' },
  banner: {
    js: "import { createRequire as requireFrom } from 'node:module'; const require = requireFrom(import.meta.url);",
  },
});
const { writeExampleRun } = await import(pathToFileURL(bundle).href);
const runs = join(folder, 'runs');
writeExampleRun(join(runs, 'nsa-30m'), { steps: 5200, planned: 8000, spikeAt: 3111, restartAt: 2400, layers: 12 });

const server = spawn(process.execPath, [join(root, 'dist/cli/main.js'), 'dashboard', '--dir', runs, '--port', '0']);
const url = await new Promise((resolve) => {
  createInterface({ input: server.stdout }).once('line', (line) => resolve(line.replace('listening on ', '')));
});
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox'] });
const shoot = async (name, route, colorScheme, scroll) => {
  const page = await browser.newPage({ viewport: { width: 1280, height: 800 }, colorScheme });
  await page.goto(`${url}/#/${route}`);
  await page.locator('canvas').first().waitFor();
  await page.waitForTimeout(1000); // until all charts are drawn
  await page.mouse.wheel(0, scroll);
  await page.waitForTimeout(300);
  await page.screenshot({ path: join(root, 'docs/images', name) });
  await page.close();
};
await shoot('dashboard-curves.png', 'run/nsa-30m', 'light', 0);
await shoot('dashboard-attention.png', 'run/nsa-30m/attention', 'dark', 650);
await browser.close();
server.kill();
rmSync(folder, { recursive: true, force: true });
