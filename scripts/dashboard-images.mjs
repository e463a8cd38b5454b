// Makes the screenshots of the dashboard in docs/images from a real run: node scripts/dashboard-images.mjs [folder]
// The folder (default: artifacts/source) is that of scripts/source-model.mjs. Needs a build (npm run build) and Chromium.
import { spawn } from 'node:child_process';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const runs = join(process.argv[2] ?? join(root, 'artifacts/source'), 'runs');
const RUN = 'trefoil-sources';
/** A member of an interface in the text of the trace, and the layer and group whose choices are shown. */
const READ = { text: 'readonly gate_entropy_mean: number', layer: '2', group: '2' };

const server = spawn(process.execPath, [join(root, 'dist/cli/main.js'), 'dashboard', '--dir', runs, '--port', '0']);
const url = await new Promise((resolve) => {
  createInterface({ input: server.stdout }).once('line', (line) => resolve(line.replace('listening on ', '')));
});
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox'] });
const shoot = async (name, route, colorScheme, prepare) => {
  const page = await browser.newPage({ viewport: { width: 1280, height: 800 }, colorScheme });
  page.setDefaultTimeout(120_000);
  await page.goto(`${url}/#/run/${RUN}${route}`);
  await page.locator('canvas, .text').first().waitFor();
  await page.waitForTimeout(2000); // until all charts are drawn
  await prepare(page);
  await page.waitForTimeout(500);
  await page.screenshot({ path: join(root, 'docs/images', name) });
  await page.close();
};

/** Holds the last token of READ.text. */
async function holdToken(page) {
  const { pieces } = await (await fetch(`${url}/api/runs/${RUN}/trace/watch.ts`)).json();
  const end = pieces.join('').indexOf(READ.text) + READ.text.length;
  let [index, length] = [0, pieces[0].length];
  while (length < end) length += pieces[++index].length;
  const token = page.locator(`.text [data-i="${index}"]`);
  await token.scrollIntoViewIfNeeded();
  await token.click();
  await page.getByLabel('Layer').selectOption(READ.layer);
  await page.getByLabel('Group').selectOption(READ.group);
  await token.evaluate((element) => element.scrollIntoView({ block: 'center' }));
  await page.mouse.move(4, 4);
}

await shoot('dashboard-curves.png', '', 'light', () => {});
await shoot('dashboard-attention.png', '/attention', 'dark', (page) => page.mouse.wheel(0, 650));
await shoot('dashboard-reader.png', '/reader', 'light', holdToken);
await browser.close();
server.kill();
