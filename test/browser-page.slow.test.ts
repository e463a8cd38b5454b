/**
 * The page that trains in a tab (examples/browser), in Chromium: with threads and without, both themes, two widths. Its weights
 * after some steps are those of native kernels, byte for byte. Skipped by name where there is no Chromium.
 */
import { execFileSync } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';
import { type Browser, chromium, type Page } from 'playwright-core';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { STORY_CONFIG } from '../examples/browser/story-config.js';
import { createModel, parseConfig, saveModel } from '../src/browser/model.js';
import { openBatches, Training } from '../src/browser/training.js';
import { readConfig } from '../src/config/load.js';
import { serveTab, type TabServer } from '../src/dashboard/tab-server.js';
import { root } from '../src/testing/cli.js';
import { cpu, describeUnless } from '../src/testing/devices.js';

/** Longer than a busy machine takes for anything. */
const PATIENCE_MS = 600_000;
const STEPS = 3;
/** Bytes of the page with one file of kernels, compressed. */
const MAX_DOWNLOAD = 350_000;

const NAMES = ['chromium', 'chromium-browser', 'google-chrome'];
const executablePath = (process.env['PATH'] ?? '')
  .split(delimiter)
  .flatMap((folder) => NAMES.map((name) => join(folder, name)))
  .find((path) => existsSync(path));
const absence = executablePath === undefined ? 'no Chromium (Debian: apt-get install chromium)' : null;
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

const SMALL = {
  model: { dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 8, n_sel: 3, w: 8 },
  data: { source: 'stories', tokenizer: 'stories' },
  train: { steps: 2, seq_len: 64, batch_size: 1, lr: 1e-3 },
} as const;

let folder: string;
let browser: Browser;
let isolated: TabServer;
let plain: TabServer;

/** `bypassCSP`: lets a test bring code of its own. */
const open = async (
  address: string,
  width: number,
  colorScheme: 'light' | 'dark',
  bypassCSP = false,
): Promise<Page> => {
  const page = await browser.newPage({ viewport: { width, height: 900 }, colorScheme, bypassCSP });
  page.setDefaultTimeout(PATIENCE_MS);
  page.on('pageerror', (error) => expect.fail(error.message));
  await page.goto(address);
  await page.locator('.tab-status', { hasText: 'Ready' }).waitFor();
  return page;
};

/** Saves the model of the page; returns the two files. */
async function saved(page: Page): Promise<{ readonly weights: string; readonly config: string }> {
  const paths = new Map<string, string>();
  const done = new Promise<void>((resolve) => {
    page.on('download', async (download) => {
      const path = join(folder, download.suggestedFilename());
      await download.saveAs(path);
      paths.set(download.suggestedFilename(), path);
      if (paths.size === 2) resolve();
    });
  });
  await page.getByRole('button', { name: 'Save the model' }).click();
  await done;
  return { weights: paths.get('model.safetensors')!, config: paths.get('config.json')! };
}

/** The page is not wider than the window, and axe finds nothing. */
async function expectFit(page: Page, width: number): Promise<void> {
  const what = `${width} px`;
  // Charts follow the width of the window when they are told of it.
  const measured = () => page.evaluate<number>('document.documentElement.scrollWidth');
  await expect.poll(measured, { message: what, timeout: 30_000 }).toBeLessThanOrEqual(width);
  await page.evaluate(axe);
  type Violation = { id: string; impact: string; nodes: { html: string; failureSummary: string }[] };
  const serious = await page.evaluate(async () => {
    const checker = (globalThis as unknown as { axe: { run(): Promise<{ violations: Violation[] }> } }).axe;
    const { violations } = await checker.run();
    return violations.map(({ id, nodes }) => `${id}: ${nodes[0].html.slice(0, 200)} ${nodes[0].failureSummary}`);
  });
  expect(serious, what).toEqual([]);
}

/** The weights that native kernels give after the same steps. */
async function nativeWeights(steps: number): Promise<Buffer> {
  const config = parseConfig({ ...STORY_CONFIG, train: { ...STORY_CONFIG.train, steps } });
  const source = createModel(cpu(), config);
  const training = new Training({ model: source.model, config, batches: openBatches(config, source.tokenizer) });
  while (training.step());
  training.free();
  const { weights } = saveModel(source, steps);
  source.free();
  return Buffer.from(await weights.arrayBuffer());
}

it('trains the config quickstart', () => {
  expect(parseConfig(STORY_CONFIG)).toEqual(readConfig('quickstart'));
});

describeUnless(absence, 'the page', () => {
  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'trefoil-tab-'));
    execFileSync(process.execPath, [join(root, 'examples/browser/build.mjs'), folder]);
    const page = pathToFileURL(`${folder}/`);
    isolated = await serveTab({ host: '127.0.0.1', port: 0, page });
    plain = await serveTab({ host: '127.0.0.1', port: 0, page, isIsolated: false });
    browser = await chromium.launch({ executablePath: executablePath!, args: ['--no-sandbox'], timeout: PATIENCE_MS });
  });
  afterAll(async () => {
    await browser?.close();
    await isolated?.close();
    await plain?.close();
    rmSync(folder, { recursive: true, force: true });
  });

  it('is small', () => {
    const files = ['index.html', 'page.js', 'worker.js', 'page.css', 'favicon.svg', 'kernels-fma.wasm', 'kernels.json'];
    const bytes = files.map((name) => gzipSync(readFileSync(join(folder, name)), { level: 9 }).length);
    expect(bytes.reduce((sum, one) => sum + one, 0)).toBeLessThanOrEqual(MAX_DOWNLOAD);
  });

  it('trains with threads, to the bits of native kernels; draws, asks and saves', async () => {
    const page = await open(`${isolated.url}/?steps=${STEPS}&threads=2`, 1400, 'light');
    try {
      const foreign: string[] = [];
      page.on('request', (request) => {
        if (!request.url().startsWith(isolated.url) && !request.url().startsWith('blob:')) foreign.push(request.url());
      });
      expect(await page.locator('.tab-status').textContent()).toContain('2 threads, kernels-fma.wasm, the same bits');
      await page.getByRole('button', { name: 'Train' }).press('Enter');
      await page.getByRole('button', { name: 'Trained' }).waitFor();
      await page.getByText(`step ${STEPS} of ${STEPS}`).waitFor();
      await page.locator('.chart canvas').first().waitFor();
      await page.getByRole('button', { name: 'Ask a question' }).click();
      await page.locator('.reader .text .block.read').first().waitFor();
      await page.getByText('The model says').waitFor();
      for (const colorScheme of ['light', 'dark'] as const)
        for (const width of [1400, 400]) {
          await page.emulateMedia({ colorScheme });
          await page.setViewportSize({ width, height: 900 });
          await expectFit(page, width);
        }
      const { weights } = await saved(page);
      expect(readFileSync(weights).equals(await nativeWeights(STEPS))).toBe(true);
      expect(foreign).toEqual([]);
    } finally {
      await page.close();
    }
  });

  it('is not needed: the main thread of a page launches kernels too, with helpers, to the same bits', async () => {
    const { outputFiles } = await build({
      entryPoints: [join(root, 'src/exports/browser.ts')],
      bundle: true,
      minify: true,
      write: false,
      format: 'iife',
      globalName: 'trefoil',
      define: { 'import.meta.url': 'location.href' },
    });
    const page = await open(`${isolated.url}/?steps=1&threads=1`, 1400, 'light', true);
    try {
      await page.evaluate(`${outputFiles[0].text}; globalThis.trefoil = trefoil;`);
      const losses = await page.evaluate(async (input) => {
        const api = (globalThis as unknown as { trefoil: typeof import('../src/exports/browser.js') }).trefoil;
        const device = await api.openDevice({ threads: 2 });
        const config = api.parseConfig(input);
        const { model, tokenizer } = api.createModel(device, config);
        const training = new api.Training({ model, config, batches: api.openBatches(config, tokenizer) });
        return [training.step()?.loss, training.step()?.loss];
      }, SMALL);
      const config = parseConfig(SMALL);
      const { model, tokenizer } = createModel(cpu(), config);
      const training = new Training({ model, config, batches: openBatches(config, tokenizer) });
      expect(losses).toEqual([training.step()?.loss, training.step()?.loss]);
      training.free();
      model.free();
    } finally {
      await page.close();
    }
  });

  it('trains to the end, to the bits of native kernels: it remembers', async ({ skip }) => {
    if (process.env['TREFOIL_LONG'] !== '1') skip('takes four minutes on two cores: TREFOIL_LONG=1');
    const page = await open(isolated.url, 1400, 'light');
    try {
      page.setDefaultTimeout(12 * PATIENCE_MS);
      await page.getByRole('button', { name: 'Train' }).click();
      await page.getByRole('button', { name: 'Trained' }).waitFor();
      const recall = await page.locator('.chart', { hasText: 'Does it remember' }).locator('b').textContent();
      console.log(`recall: ${recall}`);
      expect(Number.parseFloat(recall!)).toBeGreaterThan(90);
      const { weights } = await saved(page);
      expect(readFileSync(weights).equals(await nativeWeights(STORY_CONFIG.train.steps))).toBe(true);
    } finally {
      await page.close();
    }
  });

  it('without isolation has one thread, and runs a model that is dropped on it', async () => {
    const page = await open(`${plain.url}/?steps=1`, 400, 'dark');
    try {
      expect(await page.locator('.tab-status').textContent()).toContain('1 thread (more where');
      const files = await saved(page); // untrained
      await page.locator('input[type=file]').setInputFiles([files.config]);
      await page.getByText('a model is two files').waitFor();
      await page.locator('input[type=file]').setInputFiles([files.config, files.weights]);
      await page.getByText('parameters, trained for').waitFor();
      await page.getByRole('button', { name: 'Write' }).click();
      await expect.poll(async () => (await page.locator('.tab-story').textContent())?.length).toBeGreaterThan(40);
      await page.getByRole('button', { name: 'Stop' }).click();
      await page.getByRole('button', { name: 'Write' }).waitFor();
      await page.getByRole('button', { name: 'Ask a question' }).click();
      await page.locator('.reader').waitFor();
      // A model that 4 GiB do not hold: one line, and the page goes on.
      const config = JSON.parse(readFileSync(files.config, 'utf8'));
      const large = join(folder, 'large.json');
      writeFileSync(large, JSON.stringify({ ...config, model: { ...config.model, dim: 12_288, n_layers: 40 } }));
      await page.locator('input[type=file]').setInputFiles([large, files.weights]);
      await page.getByRole('alert').filter({ hasText: 'out of memory' }).waitFor();
      expect(await page.getByRole('alert').textContent()).toMatch(/4096 MiB in all.*use a smaller model/);
      await page.getByRole('button', { name: 'Ask another question' }).click();
      await page.getByRole('alert').waitFor({ state: 'detached' });
      await page.getByText('The model says').waitFor();
    } finally {
      await page.close();
    }
  });
});
