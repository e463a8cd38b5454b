/** The pages in Chromium: clicks, zoom, the keyboard, both themes and two widths. Skipped by name where there is no Chromium. */
import {
  appendFileSync,
  closeSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { type Browser, type BrowserContext, chromium, type Page } from 'playwright-core';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { traceText } from '../evaluate/trace.js';
import { writeTrace } from '../evaluate/write-trace.js';
import { tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import { acquireLock, type RunLock } from '../run/lock.js';
import { openHeartbeats } from '../run/logs/log.js';
import { runPaths } from '../run/paths.js';
import { LocalHost } from '../serve/host.js';
import { type RunningServer, startServer } from '../serve/server.js';
import { describeUnless } from '../testing/devices.js';
import { resolveThresholds } from '../watch/thresholds.js';
import { loadAssets } from './assets.js';
import { buildReport, writeReport } from './report/report.js';
import { type Dashboard, startDashboard } from './server.js';
import { writeExampleRun } from './testing/example-run.js';

/** Longer than a busy machine takes for anything. */
const PATIENCE_MS = 300_000;

const NAMES = ['chromium', 'chromium-browser', 'google-chrome'];
const executablePath = (process.env['PATH'] ?? '')
  .split(delimiter)
  .flatMap((folder) => NAMES.map((name) => join(folder, name)))
  .find((path) => existsSync(path));
const absence = executablePath === undefined ? 'no Chromium (Debian: apt-get install chromium)' : null;

const HOSTILE = '<img src=x onerror=alert(1)>';
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
let folder: string;
const config = tinyConfig();
const model = tinyModel(config);
/** The model of the playground, in this thread. */
// Without end tokens: its random text ends at the limit or when it is stopped, never by itself.
const tokenizer = { ...createTokenizer('byte'), endTokens: [] };
const host = new LocalHost({ config, model, tokenizer }, { maxContext: 4000 });
const KEY = 'a-key-for-the-tests';
const TEMPLATE = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}';
let server: RunningServer;
let dashboard: Dashboard;
let browser: Browser;
let lock: RunLock;
let context: BrowserContext;
let page: Page;
let problems: string[];

/** A run that is active: this process holds its lock. */
const live = () => join(folder, 'live');

describeUnless(absence, 'the pages', () => {
  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'trefoil-pages-'));
    writeExampleRun(live(), { steps: 3000, planned: 6000, spikeAt: 1500 });
    lock = acquireLock(runPaths(live()).lock);
    writeExampleRun(join(folder, 'other'), {
      steps: 400,
      seed: 2,
      ranks: 2,
      learningRate: 3e-4,
      end: Date.now() / 1000 - 9000,
    });
    const hostile = join(folder, HOSTILE);
    mkdirSync(hostile);
    const beat = { ts: 1, iso: '', pid: 1, rank: 0, step: 3, msg: 'stop', detail: '<script>alert(2)</script>' };
    writeFileSync(runPaths(hostile).heartbeat(0), `${JSON.stringify(beat)}\n{"half`);
    writeFileSync(runPaths(hostile).config, 'train:\n  note: "<b onclick=alert(3)>bold</b>"\n');
    mkdirSync(join(folder, 'broken'));
    mkdirSync(runPaths(join(folder, 'broken')).heartbeat(0));
    const text = `${'def f(x):\n    return x + 1\n'.repeat(8)}<i>f(2)</i>`;
    mkdirSync(join(live(), 'traces'));
    writeTrace(join(live(), 'traces', 'code.safetensors'), model, traceText(model, [...Buffer.from(text)]), {
      model: 'tiny',
      step: 7,
      pieces: [...text],
    });
    const needle = [0, 50, 100].flatMap((depth) =>
      [256, 1024].map((length) => ({ without: null, length, depth, trials: 10, correct: 9, accuracy: 0.9 })),
    );
    writeFileSync(join(live(), 'needle.json'), JSON.stringify({ rows: needle }));
    dashboard = await startDashboard({
      dir: folder,
      host: '127.0.0.1',
      port: 0,
      thresholds: resolveThresholds({}),
      model: { host, id: 'tiny' },
    });
    server = await startServer(host, {
      id: 'tiny',
      port: 0,
      keys: [KEY],
      chatTemplate: TEMPLATE,
      pages: loadAssets(['model', 'key']),
    });
    browser = await chromium.launch({ executablePath: executablePath!, args: ['--no-sandbox'], timeout: PATIENCE_MS });
  });
  afterAll(async () => {
    await browser.close();
    await dashboard.close();
    await server.drain(0);
    await host.close();
    model.free();
    lock.release();
    rmSync(folder, { recursive: true, force: true });
  });

  async function open(width: number, colorScheme: 'light' | 'dark'): Promise<void> {
    problems = [];
    context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, reducedMotion: 'reduce' });
    page = await context.newPage();
    page.setDefaultTimeout(PATIENCE_MS);
    page.on('console', (message) => {
      if (['error', 'warning'].includes(message.type())) problems.push(message.text());
    });
    page.on('pageerror', (error) => problems.push(String(error)));
    page.on('dialog', (dialog) => {
      problems.push(`dialog ${dialog.message()}`);
      void dialog.dismiss();
    });
    page.on('request', (request) => {
      const isOwn = [dashboard.url, server.url].some((url) => request.url().startsWith(url));
      if (!isOwn) problems.push(`request to ${request.url()}`);
    });
  }

  const go = (route: string) => page.goto(`${dashboard.url}/#/${route}`);
  const run = (name: string, ...rest: string[]) => ['run', name, ...rest].map(encodeURIComponent).join('/');

  beforeEach(() => open(1400, 'light'));
  afterEach(async () => {
    await context.close();
    expect(problems).toEqual([]);
  });

  it('list runs: sorted, searched, broken and hostile ones inert, several compared', async () => {
    await go('');
    await page.getByRole('link', { name: 'live' }).waitFor();
    const names = () => page.locator('td.col-name a').allTextContents();
    expect(new Set(await names())).toEqual(new Set(['live', 'other', 'broken', HOSTILE]));
    await page.getByRole('button', { name: 'Run' }).click();
    expect(await names()).toEqual([HOSTILE, 'broken', 'live', 'other'].sort((a, b) => a.localeCompare(b)));
    expect(await page.locator('tr', { hasText: 'broken' }).first().textContent()).toContain('is a folder');
    await page.getByRole('searchbox').fill('lr 0.0003');
    await expect.poll(names).toEqual(['other']);
    await page.getByRole('searchbox').fill('');
    await page.getByLabel('Compare live').check();
    await page.getByLabel('Compare other').check();
    await page.getByRole('link', { name: 'Compare' }).click();
    await page.getByRole('heading', { name: 'Config: differences' }).waitFor();
    expect(await page.locator('table.config').first().textContent()).toContain('train.lr');
    const legend = page.locator('.chart').first().locator('.legend-name');
    await expect.poll(() => legend.allTextContents()).toEqual(expect.arrayContaining(['live', 'other']));
    const gates = page.locator('.chart', { hasText: 'Gates' }).locator('.legend-name');
    expect(await gates.allTextContents()).toContain('other window');
    await go(run(HOSTILE));
    await page.getByRole('heading', { name: HOSTILE }).waitFor();
    expect(await page.locator('.events').textContent()).toContain('<script>');
    expect(await page.locator('.config').textContent()).toContain('<b onclick');
    expect(await page.locator('main img, main script, main b[onclick]').count()).toBe(0);
    await go(run('broken'));
    await page.getByText('This folder is not a readable run').waitFor();
  });

  it('draw a run: the spike, a new step, zoom by mouse, axes, smoothing, config', async () => {
    await go(run('live'));
    // A mixture has a curve for each of its sources.
    const bySource = page.locator('.chart', { hasText: 'Validation loss by source' });
    for (const source of ['code', 'web']) await bySource.getByText(source, { exact: true }).first().waitFor();
    const loss = page.locator('.chart', { hasText: 'Loss' }).first();
    const plot = loss.locator('.plot');
    await loss.locator('canvas').waitFor();
    expect(await page.locator('.chart').count()).toBe(10);
    expect(await page.locator('.chart', { hasText: 'recall' }).count()).toBe(1); // a metric of the program's own
    const writer = openHeartbeats(runPaths(live()).heartbeat(0), 0);
    await page.locator('.live.on').waitFor();
    const started = Date.now();
    writer.write({ step: 3001, msg: 'progress', loss: 1.2345, toks_per_s: 100 });
    await expect.poll(() => page.locator('.figures').textContent(), { interval: 20 }).toContain('1.234');
    console.log(`a new step was visible after ${Date.now() - started} ms`);
    writer.close();
    const box = (await plot.boundingBox())!;
    const detail = page.waitForResponse((response) => /columns\?.*from=/.test(response.url()));
    await page.mouse.move(box.x + box.width * 0.45, box.y + 80);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.6, box.y + 80, { steps: 5 });
    await page.mouse.up();
    await detail;
    // All charts show the zoomed range and the cursor.
    await page.getByRole('button', { name: 'Show all' }).waitFor();
    const steps = await page.locator('.legend-x').allTextContents();
    expect(steps.length).toBeGreaterThan(4);
    expect(new Set(steps).size).toBeLessThanOrEqual(2);
    await page.getByRole('button', { name: 'Show all' }).click();
    await page.getByRole('button', { name: 'Tokens' }).click();
    await page.getByRole('button', { name: 'Time' }).click();
    await page.getByLabel('Log scale').check();
    await page.getByLabel('Smoothing').fill('0.9');
    expect(await page.locator('.slider output').first().textContent()).toBe('0.90');
    await page.getByLabel('Compare the config with').selectOption('other');
    await page.getByRole('heading', { name: 'Config: differences' }).waitFor();
    expect(await page.locator('.sample').textContent()).not.toBe('');
  });

  it('draw the ranks of a run over each other', async () => {
    await go(run('other'));
    await page.getByLabel('Ranks').selectOption('all ranks');
    const legend = page.locator('.chart', { hasText: 'Throughput' }).locator('.legend-name');
    await expect.poll(() => legend.allTextContents()).toEqual(['rank 0', 'rank 1']);
    // training.csv is that of rank 0.
    const rate = page.locator('.chart', { hasText: 'Learning rate' }).locator('.legend-name');
    expect(await rate.allTextContents()).toEqual(['rank 0']);
  });

  it('are used by keyboard alone: from the table to a zoomed chart and back', async () => {
    await go('');
    await page.getByRole('link', { name: 'live' }).waitFor();
    const focused = () => page.evaluate<string>(`document.activeElement?.textContent ?? ''`);
    for (let i = 0; i < 60 && (await focused()) !== 'live'; i++) await page.keyboard.press('Tab');
    await page.keyboard.press('Enter');
    await page.getByRole('heading', { name: 'live' }).waitFor();
    await page.locator('.chart canvas').first().waitFor();
    const onChart = () => page.evaluate<boolean>(`document.activeElement?.classList.contains('plot') ?? false`);
    for (let i = 0; i < 60 && !(await onChart()); i++) await page.keyboard.press('Tab');
    await page.keyboard.press('ArrowLeft');
    await page.locator('.legend-x').first().waitFor();
    await page.keyboard.press('+');
    await page.getByRole('button', { name: 'Show all' }).waitFor();
    await page.keyboard.press('0');
    await page.getByText('Drag to zoom').waitFor();
  });

  it('show the health of attention by layer and step', async () => {
    await go(run('live', 'attention'));
    await page.getByRole('heading', { name: 'By layer, over time' }).waitFor();
    expect(await page.locator('.heat').count()).toBe(9);
    const heat = page.locator('.heat', { hasText: 'Gate entropy' }).locator('canvas');
    await heat.hover();
    expect(await page.locator('.heat output').first().textContent()).toMatch(/layer \d · step .* · [\d.]+/);
    await heat.focus();
    await page.keyboard.press('ArrowDown');
    await page.getByLabel(/^step/).fill('3');
    expect(await page.locator('.cards').textContent()).toContain('Overlap between layers');
    await page.getByLabel('Layer').selectOption('2');
    expect(await page.getByText('Needles found').count()).toBe(1);
    await go(run('other', 'attention'));
    await page.getByText('No needle results').waitFor();
  });

  it('show what a token read and who read a block', async () => {
    await go(run('live', 'reader'));
    const last = page.locator('.text [data-i="218"]');
    await last.click();
    await page.getByRole('heading', { name: 'Blocks it read' }).waitFor();
    await expect.poll(() => page.locator('.block.read').count()).toBeGreaterThan(1);
    expect(await page.locator('.text i').count()).toBe(0); // <i> of the text is text
    await page.keyboard.press('ArrowLeft');
    await expect.poll(() => page.locator('.facts').textContent()).toContain('217');
    await page.locator('.blocks-read button').first().click();
    await expect.poll(() => page.locator('.text .reader').count()).toBeGreaterThan(0);
    await go(run('other', 'reader'));
    await page.getByText('No traces yet').waitFor();
  });

  /** A short text in the playground, with the alternatives of a token. */
  async function fillOutput(): Promise<void> {
    await page.getByLabel('Maximum tokens').fill('20');
    await page.getByLabel('Seed').fill('5');
    await page.getByRole('button', { name: 'Generate' }).click();
    await page.getByText('ended at the limit of tokens').waitFor();
    await page.locator('.token-text').focus();
    await page.keyboard.press('End');
    await page.locator('.alternatives li').first().waitFor();
  }

  it('generate in the playground by keyboard, list alternatives, take one, and stop', async () => {
    await go('');
    await page.getByRole('link', { name: 'live' }).waitFor();
    const focused = () => page.evaluate<string>(`document.activeElement?.textContent ?? ''`);
    for (let i = 0; i < 60 && (await focused()) !== 'Playground'; i++) await page.keyboard.press('Tab');
    await page.keyboard.press('Enter');
    await page.getByRole('heading', { name: 'Playground' }).waitFor();
    const inPrompt = () => page.evaluate<boolean>(`document.activeElement?.tagName === 'TEXTAREA'`);
    for (let i = 0; i < 60 && !(await inPrompt()); i++) await page.keyboard.press('Tab');
    await page.keyboard.type('def f(x): ');
    await page.getByLabel('Maximum tokens').fill('20');
    await page.getByLabel('Seed').fill('5');
    await page.getByLabel('Prompt').focus();
    await page.keyboard.press('Control+Enter');
    await expect.poll(() => page.locator('.status').textContent()).toMatch(/limit of tokens · 20 tokens · .*tokens\/s/);
    const tokens = page.locator('.token-text [data-i]');
    expect(await tokens.count()).toBe(20);
    await page.locator('.token-text').focus();
    await page.keyboard.press('Home');
    await page.keyboard.press('ArrowRight');
    const alternatives = page.locator('.alternatives li');
    await expect.poll(() => alternatives.count()).toBeGreaterThan(3);
    const other = page.locator('.alternatives button').first();
    await other.click();
    // One token before the chosen one, the chosen one, and 20 new ones.
    await expect.poll(() => tokens.count()).toBe(22);
    await page.getByText('ended at the limit').waitFor();
    await page.getByLabel('Maximum tokens').fill('3900');
    await page.getByLabel('Prompt').press('Control+Enter');
    await expect.poll(() => tokens.count()).toBeGreaterThan(2);
    await page.getByRole('button', { name: 'Stop' }).click();
    await expect.poll(() => page.locator('.status').textContent()).toContain('stopped');
    await expect.poll(() => host.stats().running).toBe(0); // the engine stops as well
  });

  it('show live what the model reads in the text of the playground', async () => {
    await go('playground');
    await page.getByLabel('Prompt').fill('def f(x):\n    return x + 1\n'.repeat(8));
    await page.getByRole('button', { name: 'Show what it reads' }).click();
    await page.getByRole('heading', { name: 'What it read' }).waitFor();
    await page.locator('.text [data-i="200"]').click();
    await expect.poll(() => page.locator('.block.read').count()).toBeGreaterThan(1);
    await page.locator('.blocks-read button').first().click();
    await expect.poll(() => page.locator('.text .reader').count()).toBeGreaterThan(0);
    await page.getByRole('link', { name: 'Back to the playground' }).click();
    expect(await page.getByLabel('Prompt').inputValue()).toContain('return x + 1');
  });

  it('ask for the key of a server, keep it in memory only, and chat', async () => {
    await page.goto(server.url);
    await page.getByLabel('API key').fill('wrong');
    await page.getByRole('button', { name: 'Connect' }).click();
    await page.getByText('the API key is missing or wrong').waitFor();
    problems = problems.filter((text) => !text.includes('401')); // the browser reports the refusal
    await page.getByLabel('API key').fill(KEY);
    await page.keyboard.press('Enter');
    await page.getByLabel('Maximum tokens').fill('12'); // the page opens on Chat: the model has a template
    await page.getByLabel('Message', { exact: true }).fill('hello');
    await page.keyboard.press('Enter');
    await page.getByText('ended at the limit of tokens').waitFor();
    expect(await page.locator('.message.user p').textContent()).toBe('hello');
    expect(await page.locator('.message.assistant [data-i]').count()).toBe(12);
    const stored = await page.evaluate<string>(
      `JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie])`,
    );
    expect(stored).not.toContain(KEY);
  });

  it('show calls of tools as such, and ask for their results', async () => {
    // With random weights a call must be required, which the page leaves to the model.
    await page.route('**/v1/chat/completions', async (route) => {
      const body = route.request().postDataJSON() as Record<string, unknown>;
      const isResult = JSON.stringify(body['messages']).includes('"role":"tool"');
      await route.continue({
        postData: JSON.stringify({
          ...body,
          parallel_tool_calls: false,
          ...(isResult ? {} : { tool_choice: 'required' }),
        }),
      });
    });
    await page.goto(server.url);
    await page.getByLabel('API key').fill(KEY);
    await page.keyboard.press('Enter');
    await page.getByLabel('Maximum tokens').fill('120');
    await page.getByLabel(/^Tools/).fill('[');
    await page.getByLabel('Message', { exact: true }).fill('2 + 2?');
    await page.keyboard.press('Enter');
    await page.getByText('Tools: ').waitFor(); // refused by the page
    const parameters = { type: 'object', properties: { a: { type: 'integer' } }, required: ['a'] };
    await page
      .getByLabel(/^Tools/)
      .fill(JSON.stringify([{ type: 'function', function: { name: 'double', parameters } }]));
    await page.getByLabel('Message', { exact: true }).press('Enter');
    await page.getByText('called tools').waitFor();
    const [name, given] = await page.locator('.message.assistant .call code').allTextContents();
    expect(name).toBe('double');
    expect(Number.isInteger((JSON.parse(given) as { a: number }).a)).toBe(true);
    await page.getByLabel('Result of double').fill('4');
    await page.keyboard.press('Enter');
    await page.locator('.message.tool').waitFor();
    await expect.poll(() => page.locator('.message.assistant').count()).toBe(2);
  });

  it('save and halt a run with the token only', async () => {
    const { halt } = runPaths(live());
    await go(run('live'));
    await page.getByLabel(/^Token/).fill('wrong');
    await page.getByRole('button', { name: 'Halt…' }).click();
    await page.getByRole('button', { name: 'Halt live' }).click();
    await page.getByText('the token is missing or wrong').waitFor();
    expect(existsSync(halt)).toBe(false);
    problems = problems.filter((text) => !text.includes('403')); // the browser reports the refusal
    await page.getByLabel(/^Token/).fill(dashboard.token);
    // This process holds the lock of the run, and has its heartbeats open as a training has.
    const saved = new Promise((resolve) => process.once('SIGUSR2', resolve));
    const heartbeats = openSync(runPaths(live()).heartbeat(0), 'a');
    await page.getByRole('button', { name: 'Save now' }).click();
    await page.getByText('a checkpoint is saved after the step').waitFor();
    await saved;
    closeSync(heartbeats);
    await page.getByRole('button', { name: 'Halt…' }).click();
    await page.getByLabel('Reason').fill('enough');
    await page.getByRole('button', { name: 'Halt live' }).click();
    await page.getByText('stops after its step').waitFor();
    expect(readFileSync(halt, 'utf8')).toBe('halt: enough\n');
    rmSync(halt);
  });

  it.each([
    [1400, 'light'],
    [1400, 'dark'],
    [400, 'light'],
    [400, 'dark'],
  ] as const)('fit %i px in %s, without serious accessibility problems', async (width, theme) => {
    await context.close();
    await open(width, theme);
    const pages = [
      '',
      run('live'),
      run('live', 'attention'),
      run('live', 'reader'),
      'compare/live/other',
      'playground',
    ];
    for (const route of pages) {
      await go(route);
      await page.locator('main h1').waitFor();
      await page.locator('table, canvas, .text, textarea').first().waitFor();
      if (route === 'playground') await fillOutput();
      await expectFit(width, route);
    }
    await page.getByLabel('Prompt').fill('def f(x):\n    return x + 1\n'.repeat(8));
    await page.getByRole('button', { name: 'Show what it reads' }).click();
    await page.getByRole('heading', { name: 'What it read' }).waitFor();
    await page.locator('.text [data-i="200"]').click();
    await expect.poll(() => page.locator('.block.read').count()).toBeGreaterThan(1);
    await expectFit(width, 'what the model reads in the text of the playground');
    await page.goto(server.url);
    await page.getByLabel('API key').waitFor();
    await expectFit(width, 'the form of the key');
  });

  /** The page is not wider than the window, and axe finds nothing serious. */
  async function expectFit(width: number, what: string): Promise<void> {
    expect(await page.evaluate<number>('document.documentElement.scrollWidth'), what).toBeLessThanOrEqual(width);
    // Evaluated by the debugger, which the page's policy does not restrict.
    await page.evaluate(axe);
    const serious = await page.evaluate(async () => {
      const checker = (globalThis as unknown as { axe: { run(): Promise<{ violations: Violation[] }> } }).axe;
      type Violation = { id: string; impact: string; nodes: { html: string; failureSummary: string }[] };
      const { violations } = await checker.run();
      return violations
        .filter(({ impact }) => impact === 'serious' || impact === 'critical')
        .map(({ id, nodes }) => `${id}: ${nodes[0].html.slice(0, 200)} ${nodes[0].failureSummary}`);
    });
    expect(serious, what).toEqual([]);
  }

  describe('of a report', () => {
    const names = () => page.locator('.chart').first().locator('.legend-name').allTextContents();
    /** Writes a report and opens its file, which requests nothing. */
    async function openReport(dirs: readonly string[]): Promise<void> {
      const out = join(folder, 'reports', `${reports++}.html`);
      await writeReport(buildReport(dirs, HOSTILE), out, resolveThresholds({}));
      const url = pathToFileURL(out).href;
      page.removeAllListeners('request').on('request', (request) => {
        if (request.url() !== url) problems.push(`request to ${request.url()}`);
      });
      await page.goto(url);
      await page.getByRole('heading', { name: HOSTILE }).waitFor();
    }
    let reports = 0;

    it('are those of the run page: spike, zoom, axes, attention, samples, on paper light', async () => {
      await page.emulateMedia({ colorScheme: 'dark' });
      await openReport([live()]);
      await page.locator('.chart canvas').first().waitFor();
      expect(await names()).toEqual(['training', 'validation']);
      expect(await page.locator('.chart').count()).toBe(10 + 4);
      expect(await page.locator('.heat').count()).toBe(9);
      expect(await page.locator('.sample').textContent()).not.toBe('');
      const loss = page.locator('.chart').first().locator('.plot');
      await loss.focus();
      await page.keyboard.press('ArrowLeft');
      await page.keyboard.press('+');
      await page.getByRole('button', { name: 'Show all' }).click();
      await page.getByRole('button', { name: 'Time' }).click();
      await page.getByLabel('Log scale').check();
      const theme = () => page.evaluate<string>('document.documentElement.dataset.theme');
      const pixels = () => page.evaluate<string>(`document.querySelector('.plot canvas').toDataURL()`);
      const dark = await pixels();
      expect(await theme()).toBe('dark');
      await page.evaluate(`dispatchEvent(new Event('beforeprint'))`);
      expect(await theme()).toBe('light');
      expect(await pixels()).not.toBe(dark); // redrawn before the page is printed
      await page.evaluate(`dispatchEvent(new Event('afterprint'))`);
      expect(await theme()).toBe('dark');
      expect((await page.pdf()).subarray(0, 5).toString()).toBe('%PDF-');
    });

    it('compare runs; broken files are named, and texts are inert', async () => {
      const damaged = join(folder, 'reports', '<b>damaged');
      writeExampleRun(damaged, { steps: 30 });
      appendFileSync(runPaths(damaged).heartbeat(0), 'no record\n{"half');
      writeFileSync(runPaths(damaged).attention, '{"step":1,"entropy":"<i>"}\n{"step":2,"forced":3,"distance":[{}]}\n');
      writeFileSync(runPaths(damaged).samples, `${JSON.stringify({ step: 3, text: '</script><u>sample' })}\n`);
      writeFileSync(join(damaged, 'needle.json'), '{"rows":{"length":3}}');
      writeFileSync(runPaths(damaged).config, `train: {note: "${HOSTILE}"}\nx: [`);
      await openReport([damaged, join(folder, 'other')]);
      await expect.poll(names).toEqual(expect.arrayContaining(['<b>damaged', 'other']));
      expect(await page.locator('.health').first().textContent()).toContain('1 lines of the heartbeat file');
      expect(await page.locator('.sample').first().textContent()).toBe('</script><u>sample');
      expect(await page.locator('main img, main script, main u, main h2 b').count()).toBe(0);
    });

    it.each([
      [1400, 'light'],
      [400, 'dark'],
    ] as const)('fit %i px in %s, without serious accessibility problems', async (width, theme) => {
      await context.close();
      await open(width, theme);
      await openReport([live(), join(folder, 'other')]);
      await page.locator('.chart canvas').first().waitFor();
      await expectFit(width, 'a report');
    });
  });

  it('work without any run, and follow the switch of colours', async () => {
    const empty = await startDashboard({
      dir: join(folder, 'nothing'),
      host: '127.0.0.1',
      port: 0,
      thresholds: resolveThresholds({}),
    });
    try {
      await context.close();
      const own = await browser.newContext();
      own.setDefaultTimeout(PATIENCE_MS);
      const first = await own.newPage();
      await first.goto(empty.url);
      await first.getByText('No runs yet').waitFor();
      const before = await first.evaluate<string>('getComputedStyle(document.body).backgroundColor');
      await first.getByRole('button', { name: /^Switch to/ }).click();
      expect(await first.evaluate<string>('getComputedStyle(document.body).backgroundColor')).not.toBe(before);
      await own.close();
    } finally {
      await empty.close();
    }
  });
});
