import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { temporaryFolder } from '../testing/run.js';
import { type Alert, notify } from './notify.js';

const alert: Alert = {
  run: 'r',
  rank: 0,
  rule: 'loss',
  level: 'red',
  value: 'NaN',
  limit: 'finite',
  line: "CRITICAL: it's $HOME `x`",
  iso: '2026-01-01T00:00:00.000Z',
};

async function problemsOf(channels: Parameters<typeof notify>[1]): Promise<string[]> {
  const problems: string[] = [];
  await notify(alert, channels, (line) => problems.push(line));
  return problems;
}

it('hands the alert to a command as JSON and as variables, unharmed by the shell', async () => {
  const folder = temporaryFolder();
  const [json, line] = [join(folder.path, 'json'), join(folder.path, 'line')];
  expect(await problemsOf({ command: `cat > ${json}; printf %s "$TREFOIL_ALERT_LINE" > ${line}` })).toEqual([]);
  expect(JSON.parse(readFileSync(json, 'utf8'))).toEqual(alert);
  expect(readFileSync(line, 'utf8')).toBe(alert.line);
  folder.remove();
});

it('tells of a command that fails, and of one that does not read', async () => {
  expect(await problemsOf({ command: 'exit 3' })).toEqual(['the alert command exited with code 3']);
  expect(await problemsOf({ command: 'kill -9 $$' })).toEqual(['the alert command exited with SIGKILL']);
});

it('tells of a webhook that refuses, redirects or is not there', async () => {
  const server = createServer((request, response) => {
    response.writeHead(request.url === '/moved' ? 302 : 500, { location: '/elsewhere' }).end();
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const base = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  expect(await problemsOf({ webhook: base })).toEqual(['the webhook answered 500']);
  expect((await problemsOf({ webhook: `${base}/moved` }))[0]).toContain('could not be reached');
  await new Promise((resolve) => server.close(resolve));
  expect((await problemsOf({ webhook: base }))[0]).toContain('could not be reached');
});
