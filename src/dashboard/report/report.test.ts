import { appendFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { runPaths } from '../../run/paths.js';
import { temporaryFolder } from '../../testing/run.js';
import { RecordedRun } from '../../watch/testing/recorded-run.js';
import { resolveThresholds } from '../../watch/thresholds.js';
import type { ReportRun } from '../answers.js';
import { type ChartData, decodeChartData } from '../chart-data.js';
import { buildReport, writeReport } from './report.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

function recorded(name: string, steps = 50): string {
  const dir = join(folder.path, name);
  mkdirSync(dir, { recursive: true });
  new RecordedRun(dir).steps(1, steps, 1);
  return dir;
}

const write = (dirs: readonly string[], title: string, out: string) =>
  writeReport(buildReport(dirs, title), out, resolveThresholds({}));

/** The data that the page draws. */
function embedded(html: string): ReportRun[] {
  return JSON.parse(/<script type="application\/json" id="data">([^<]*)</.exec(html)![1]) as ReportRun[];
}

function chartDataOf({ columns }: ReportRun): ChartData {
  return decodeChartData(Uint8Array.from(Buffer.from(columns.heartbeat, 'base64')).buffer);
}

describe('the loss of a report', () => {
  it('has a point for every step, although training.csv has one every 20', () => {
    const dir = recorded('run');
    writeFileSync(runPaths(dir).training, 'step,loss,lr,toks_per_s\n1,5,1e-3,100\n20,4,1e-3,100\n40,3,1e-3,100\n');
    const { loss } = buildReport([dir], 'T').runs[0].series;
    expect(loss.map(([step]) => step)).toEqual(Array.from({ length: 50 }, (_, i) => i + 1));
  });

  it('keeps spikes of a long run', () => {
    const dir = join(folder.path, 'long');
    mkdirSync(dir);
    const run = new RecordedRun(dir);
    run.steps(1, 3000, 1, (step) => (step === 1501 ? { loss: 99 } : {}));
    const { loss } = buildReport([dir], 'T').runs[0].series;
    expect(loss.length).toBeLessThan(1300);
    expect(loss).toContainEqual([1501, 99]);
  });
});

it('has the peak of memory of more steps than a call may have arguments', () => {
  const dir = recorded('many', 1);
  const { ts } = JSON.parse(readFileSync(runPaths(dir).heartbeat(0), 'utf8').split('\n')[0]);
  const line = (step: number) =>
    `{"ts":${ts + step},"pid":1,"rank":0,"step":${step},"msg":"progress","gpu_mem_reserved":${step}}\n`;
  appendFileSync(runPaths(dir).heartbeat(0), Array.from({ length: 150_000 }, (_, i) => line(i + 2)).join(''));
  expect(buildReport([dir], 'T').runs[0].peak_mem_mib).toBe(150_001);
});

describe('what ran', () => {
  it('names the kernels, the peak of memory, and every switch that is not at its default', async () => {
    const dir = recorded('run');
    const facts = { kernels: 'kernels per branch, cpu fp32', environment: { DDP_SAFE: '1', NSA_LR: '1', CONFIG: 'x' } };
    writeFileSync(runPaths(dir).env, JSON.stringify(facts));
    const config = 'runtime: {fused: false, debug_timing: true}\ntrain: {ddp_safe: true}\nnsa: {force_branch: win}\n';
    writeFileSync(runPaths(dir).config, config);
    const [run] = buildReport([dir], 'T').runs;
    const switches = [
      'runtime.fused: false',
      'runtime.debug_timing: true',
      'train.ddp_safe: true',
      'nsa.force_branch: win',
    ];
    expect(run.deviations).toEqual(expect.arrayContaining([...switches, 'DDP_SAFE=1', 'NSA_LR=1']));
    expect(run.deviations.join()).not.toContain('CONFIG');
    expect(run.peak_tensors_mib).toBe(900);
    const out = join(folder.path, 'x.md');
    await write([dir], 'T', out);
    expect(readFileSync(out, 'utf8')).toContain('| attention kernels | kernels per branch, cpu fp32 |');
  });
});

describe('the HTML file', () => {
  it('is the only file when --out names it, and holds its script and data itself', async () => {
    const out = join(folder.path, 'out', 'mine.html');
    expect(await write([recorded('run')], 'My report', out)).toEqual([out]);
    expect(readdirSync(join(folder.path, 'out'))).toEqual(['mine.html']);
    const html = readFileSync(out, 'utf8');
    expect(html).toMatch(/^<!doctype html>/);
    expect(html).toContain('<h1>My report</h1>');
    const [run] = embedded(html);
    expect(chartDataOf(run).buckets).toBe(50);
    // Columns that the run does not have take no room.
    expect(chartDataOf(run).columns).not.toContain('mfu');
    expect(html).not.toMatch(/<(link|img|iframe|object)|\bsrc="|@import|url\(/i);
    expect(html).toMatch(/default-src 'none'; script-src 'sha256-[^']*'; style-src 'sha256-[^']*'; base-uri 'none'/);
  });

  it('is a Markdown or JSON file when --out names one; other files are refused, and nothing is created', async () => {
    const dir = recorded('run');
    const at = (name: string) => join(folder.path, 'one', name);
    expect(await write([dir], 'My report', at('x.md'))).toEqual([at('x.md')]);
    expect(await write([dir], 'My report', at('x.json'))).toEqual([at('x.json')]);
    expect(readdirSync(at(''))).toEqual(['x.json', 'x.md']);
    const markdown = readFileSync(at('x.md'), 'utf8');
    expect(markdown).toContain('# My report');
    expect(markdown).not.toContain('.svg');
    expect(JSON.parse(readFileSync(at('x.json'), 'utf8')).runs).toHaveLength(1);
    await expect(write([dir], 'T', at('x.pdf'))).rejects.toThrow('a file ending in .html, .md or .json');
    expect(readdirSync(at(''))).toEqual(['x.json', 'x.md']);
  });

  it('draws at most 1024 buckets of a long run, with its spike', async () => {
    const dir = join(folder.path, 'long');
    mkdirSync(dir);
    new RecordedRun(dir).steps(1, 3000, 1, (step) => (step === 1501 ? { loss: 99 } : {}));
    const out = join(folder.path, 'long.html');
    await write([dir], 'T', out);
    const data = chartDataOf(embedded(readFileSync(out, 'utf8'))[0]);
    expect(data.buckets).toBeLessThanOrEqual(1024);
    const { first, second } = data.values.get('loss')!;
    expect(Math.max(...first, ...second)).toBe(99);
  });

  it('names what is damaged in a run', async () => {
    const dir = recorded('damaged');
    appendFileSync(runPaths(dir).heartbeat(0), 'no record\n{"half');
    writeFileSync(runPaths(dir).config, 'train: [');
    writeFileSync(runPaths(dir).attention, '{"step":1,"entropy":"none"}\n\0\0\n');
    writeFileSync(runPaths(dir).samples, '[]\n');
    mkdirSync(join(dir, 'needle.json'));
    const out = join(folder.path, 'damaged.html');
    await write([dir], 'T', out);
    const [run] = embedded(readFileSync(out, 'utf8'));
    expect(run.problems.join()).toContain('needle.json: is a folder');
    rmSync(join(dir, 'needle.json'), { recursive: true });
    await write([dir], 'T', out);
    const [second] = embedded(readFileSync(out, 'utf8'));
    expect(second.damaged).toBe(1);
    expect(second.problems.join()).toContain('config.yaml');
    expect(readFileSync(out, 'utf8')).toContain('config.yaml is missing or cannot be read');
    expect(() => buildReport([join(folder.path, 'missing')], 'T')).toThrow(/missing/);
    mkdirSync(join(folder.path, 'empty'));
    expect(() => buildReport([join(folder.path, 'empty')], 'T')).toThrow(/has no heartbeats/);
  });

  it('is written beside the Markdown into a folder', async () => {
    const out = join(folder.path, 'report');
    await write([recorded('run')], 'T', out);
    expect(readdirSync(out).sort()).toEqual([
      ...['fetch.svg', 'gate_entropy.svg', 'gate_shares.svg', 'loss.svg', 'memory.svg'],
      ...['report.html', 'report.json', 'report.md', 'throughput.svg'],
    ]);
  });

  it('shows texts of an untrusted run without running them', async () => {
    const attack = `<script>alert(1)</script><img src=x onerror=alert(1)>"'\x1b[2J](javascript:alert(1))|`;
    const dir = recorded('javascript:alert(1)');
    writeFileSync(
      runPaths(dir).env,
      JSON.stringify({
        git: { commit: attack, branch: { toString: 1 } },
        machine: { cpu: attack, cores: [attack], platform: null },
        device: attack,
        versions: { [attack]: attack },
        environment: { [`NSA_${attack}`]: attack },
      }),
    );
    writeFileSync(runPaths(dir).metrics, JSON.stringify({ status: attack, step: attack }));
    const out = join(folder.path, 'report');
    writeFileSync(runPaths(dir).samples, `${JSON.stringify({ step: 1, text: attack })}\n`);
    await write([dir], attack, out);
    for (const name of ['report.html', 'report.md']) {
      const text = readFileSync(join(out, name), 'utf8');
      expect(text).toContain('alert(1)'); // shown, as text
      // The two scripts of the page are its data and its own code, which the policy names by its hash.
      expect(text.match(/<script|<img/gi) ?? [], name).toHaveLength(name === 'report.md' ? 0 : 2);
      expect(text, name).not.toMatch(name === 'report.md' ? /(?<!\\)\]\(javascript:/ : /href=.javascript:/);
    }
    expect(readFileSync(join(out, 'report.html'), 'utf8')).not.toContain('\x1b');
    const [loss] = readdirSync(out).filter((name) => name.startsWith('gate_shares'));
    expect(readFileSync(join(out, loss), 'utf8')).toMatch(/^<svg [\s\S]*<\/svg>\n$/);
  });
});
