import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { runPaths } from '../../run/paths.js';
import { temporaryFolder } from '../../testing/run.js';
import { RecordedRun } from '../testing/recorded-run.js';
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

describe('the HTML file', () => {
  it('is the only file when --out names it, and holds the plots itself', () => {
    const out = join(folder.path, 'out', 'mine.html');
    expect(writeReport(buildReport([recorded('run')], 'My report'), out)).toEqual([out]);
    expect(readdirSync(join(folder.path, 'out'))).toEqual(['mine.html']);
    const html = readFileSync(out, 'utf8');
    expect(html).toMatch(/^<!doctype html>/);
    expect(html).toContain('<h1>My report</h1>');
    expect(html.match(/<svg [^>]*width="760" height="\d+"/g)).toHaveLength(6);
    // Nothing is requested: the only URL is the name of the SVG namespace, links are relative.
    expect(html.match(/https?:[^"]*/g)?.every((url) => url === 'http://www.w3.org/2000/svg')).toBe(true);
    expect(html).not.toMatch(/<(script|link|img|iframe|object)|\bsrc=|@import|url\(/i);
    expect(html).toContain("default-src 'none'");
  });

  it('is written beside the Markdown into a folder', () => {
    const out = join(folder.path, 'report');
    writeReport(buildReport([recorded('run')], 'T'), out);
    expect(readdirSync(out).sort()).toEqual([
      ...['fetch.svg', 'gate_entropy.svg', 'gate_shares.svg', 'loss.svg', 'memory.svg'],
      ...['report.html', 'report.json', 'report.md', 'throughput.svg'],
    ]);
  });

  it('shows texts of an untrusted run without running them', () => {
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
    writeReport(buildReport([dir], attack), out);
    for (const name of ['report.html', 'report.md']) {
      const text = readFileSync(join(out, name), 'utf8');
      expect(text).toContain('alert(1)'); // shown, as text
      expect(text, name).not.toMatch(/<script|<img/i);
      expect(text, name).not.toMatch(name === 'report.md' ? /(?<!\\)\]\(javascript:/ : /href=.javascript:/);
    }
    expect(readFileSync(join(out, 'report.html'), 'utf8')).not.toContain('\x1b');
    const [loss] = readdirSync(out).filter((name) => name.startsWith('gate_shares'));
    expect(readFileSync(join(out, loss), 'utf8')).toMatch(/^<svg [\s\S]*<\/svg>\n$/);
  });
});
