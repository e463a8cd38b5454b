import { expect, test } from 'vitest';
import { crc32c, maskedCrc32c } from './tensorboard.js';

/** Vectors of RFC 3720, appendix B.4. */
test('known checksums', () => {
  expect(crc32c(new Uint8Array(0))).toBe(0);
  expect(crc32c(new Uint8Array(32))).toBe(0x8a9136aa);
  expect(crc32c(new Uint8Array(32).fill(0xff))).toBe(0x62a8ab43);
  expect(crc32c(Uint8Array.from({ length: 32 }, (_, i) => i))).toBe(0x46dd794e);
  expect(crc32c(Uint8Array.from({ length: 32 }, (_, i) => 31 - i))).toBe(0x113fdb5c);
  expect(crc32c(Buffer.from('123456789'))).toBe(0xe3069283);
});

test('the mask rotates by 15 and adds a constant', () => {
  const checksum = 0xe3069283n;
  const rotated = ((checksum >> 15n) | (checksum << 17n)) & 0xffffffffn;
  expect(maskedCrc32c(Buffer.from('123456789'))).toBe(Number((rotated + 0xa282ead8n) & 0xffffffffn));
});
