// Packs a release: this package, and one with prebuilt kernels for each platform of packages/ that is not private.
//
//   npm run kernels -- linux-x64 && npm run kernels -- linux-arm64 && npm run release -- --dry-run [--out FOLDER]
//
// Checks that the working tree is committed, versions agree, CHANGELOG.md has the version, and that every prebuilt library and
// the files in WebAssembly are those of the sources. Then builds, packs into FOLDER (default: a temporary one), and
// lists the files with their hashes. Without --dry-run they are published, the packages of the platforms first, with a
// statement of provenance: .github/workflows/release.yml does that.
//
// The packages of the platforms are `optionalDependencies` of the packed package only. In the tree they would be names that
// npm looks up before they exist, and that anybody could take.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { sourcesKey } from './kernels.mjs';

const root = fileURLToPath(new URL('..', import.meta.url));
const { values } = parseArgs({ options: { 'dry-run': { type: 'boolean' }, out: { type: 'string' } } });
const isDry = values['dry-run'] === true;

const json = (...names) => JSON.parse(readFileSync(join(root, ...names), 'utf8'));
const sha256 = (path) => createHash('sha256').update(readFileSync(path)).digest('hex');
const npm = (words, cwd) => execFileSync('npm', words, { cwd, encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] });

/** A condition of a release; a dry run goes on and lists all that do not hold. */
const problems = [];
const expect = (holds, problem) => {
  if (!holds) problems.push(problem);
};

const manifest = json('package.json');
const { version } = manifest;
const platforms = readdirSync(join(root, 'packages')).filter(
  (name) => existsSync(join(root, 'packages', name, 'package.json')) && !json('packages', name, 'package.json').private,
);

function check({ prebuiltKey }) {
  const changed = execFileSync('git', ['status', '--porcelain'], { cwd: root, encoding: 'utf8' }).trim();
  expect(changed === '', 'the working tree has changes that are not committed');
  const changelog = readFileSync(join(root, 'CHANGELOG.md'), 'utf8');
  expect(changelog.includes(`## [${version}]`), `CHANGELOG.md has no section of ${version}`);
  expect(
    json('src', 'device', 'wasm', 'kernels.json').key === sourcesKey(),
    'the files in WebAssembly are of other sources: run `npm run kernels -- wasm`',
  );
  for (const platform of platforms) {
    const folder = join(root, 'packages', platform);
    const own = json('packages', platform, 'package.json').version;
    expect(own === version, `packages/${platform} has version ${own}, not ${version}`);
    const remedy = `run \`npm run kernels -- ${platform}\``;
    if (!existsSync(join(folder, 'kernels.so'))) {
      expect(false, `packages/${platform} has no library: ${remedy}`);
      continue;
    }
    const { key, sha256: hash } = json('packages', platform, 'kernels.json');
    expect(key === prebuiltKey(platform), `packages/${platform} is of other sources: ${remedy}`);
    expect(hash === sha256(join(folder, 'kernels.so')), `packages/${platform}/kernels.so is damaged: ${remedy}`);
  }
}

/** Packs a folder; the path of the tarball. */
function pack(folder, out) {
  const [{ filename }] = JSON.parse(npm(['pack', '--json', '--ignore-scripts', '--pack-destination', out], folder));
  return join(out, filename.replace('@', '').replace('/', '-'));
}

const work = mkdtempSync(join(tmpdir(), 'trefoil-release-'));
try {
  execFileSync(process.execPath, [join(root, 'scripts', 'build.mjs'), '--quiet'], { cwd: root, stdio: 'inherit' });
  check(await import('../dist/device/cpu/prebuilt.js'));
  if (problems.length > 0) {
    for (const problem of problems) console.error(`release: ${problem}`);
    if (!isDry) process.exit(1);
  }
  const out = values.out === undefined ? join(work, 'packed') : resolve(values.out);
  mkdirSync(out, { recursive: true });
  const tarballs = [];
  const built = platforms.filter((platform) => existsSync(join(root, 'packages', platform, 'kernels.so')));
  for (const platform of built) {
    const staged = join(work, platform);
    cpSync(join(root, 'packages', platform), staged, { recursive: true });
    cpSync(join(root, 'LICENSE'), join(staged, 'LICENSE'));
    tarballs.push(pack(staged, out));
  }
  // The package as npm packs it, then its manifest alone is changed.
  const plain = pack(root, work);
  execFileSync('tar', ['-xzf', plain, '-C', work]);
  const names = built.map((platform) => json('packages', platform, 'package.json').name);
  const kernels = Object.fromEntries(names.map((name) => [name, version]));
  const packed = { ...manifest, optionalDependencies: { ...manifest.optionalDependencies, ...kernels } };
  writeFileSync(join(work, 'package', 'package.json'), `${JSON.stringify(packed, null, 2)}\n`);
  tarballs.push(pack(join(work, 'package'), out));
  for (const path of tarballs)
    console.log(`${path}: ${(readFileSync(path).length / 1000).toFixed(0)} kB, sha256 ${sha256(path)}`);
  if (isDry) {
    console.log(`nothing was published${problems.length > 0 ? `; a release needs: ${problems.join('; ')}` : ''}`);
  } else {
    for (const path of tarballs) npm(['publish', path, '--access', 'public', '--provenance'], root);
    console.log(`published ${version}`);
  }
} finally {
  rmSync(work, { recursive: true, force: true });
}
