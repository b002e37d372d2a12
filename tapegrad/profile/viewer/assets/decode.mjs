// Reads the payload; payload.py writes it and describes the format.

export async function readPayload(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return parsePayload(new Uint8Array(await new Response(stream).arrayBuffer()));
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** The header, and its columns as tables: `tables.allocs.bytes` is a Float64Array. */
export function parsePayload(bytes) {
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const tables = {};
  let at = 4 + length;
  for (const [name, count, width, delta] of header.columns) {
    const [table, column] = name.split(".");
    (tables[table] ??= {})[column] = readColumn(bytes, at, count, width, delta);
    at += count * width;
  }
  return { header, tables };
}

function readColumn(bytes, at, count, width, delta) {
  const values = new Float64Array(count);
  let sum = 0;
  for (let i = 0; i < count; i++) {
    const value = readNumber(bytes, at + i, count, width);
    values[i] = delta ? (sum += value) : value;
  }
  return values;
}

// Planes lie `step` bytes apart.  Bit operations keep 32 bits with their sign, so the upper half of 8 bytes is apart.
function readNumber(bytes, at, step, width) {
  if (width === 1) return (bytes[at] << 24) >> 24;
  if (width === 2) return ((bytes[at] << 16) | (bytes[at + step] << 24)) >> 16;
  const low = bytes[at] | (bytes[at + step] << 8) | (bytes[at + 2 * step] << 16) | (bytes[at + 3 * step] << 24);
  return width === 4 ? low : (low >>> 0) + readNumber(bytes, at + 4 * step, step, 4) * 0x100000000;
}
