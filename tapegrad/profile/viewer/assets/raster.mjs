// Pixels written one by one.  A canvas smooths the edges of what it fills, so neighbouring colours would mix into ones
// that mean nothing and steps would look like ramps; and filling 200,000 rectangles through it takes several times longer.

export class Raster {
  constructor(width, height) {
    this.width = Math.max(1, Math.floor(width));
    this.height = Math.max(1, Math.floor(height));
    this.pixels = new Uint32Array(this.width * this.height);
  }

  /** Fills x0 <= x < x1, y0 <= y < y1, cut to the picture. */
  fill(x0, y0, x1, y1, colour) {
    const left = Math.max(0, x0), right = Math.min(this.width, x1), bottom = Math.min(this.height, y1);
    if (left >= right) return;
    for (let y = Math.max(0, y0); y < bottom; y++) this.pixels.fill(colour, y * this.width + left, y * this.width + right);
  }

  /** Lays the picture over a canvas, at a place in its own pixels; those never written stay clear. */
  show(context, x, y) {
    const sheet = new OffscreenCanvas(this.width, this.height); // putImageData() alone would wipe out what is below
    sheet.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(this.pixels.buffer), this.width, this.height), 0, 0);
    context.save();
    context.resetTransform();
    context.drawImage(sheet, x, y);
    context.restore();
  }
}

/** "#rrggbb" as a pixel (in memory red comes first, and machines that run browsers are little-endian). */
export function pixel(hex) {
  const [r, g, b] = channels(hex);
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** The colour a share of the way from one to another. */
export function mix(from, to, share) {
  const a = channels(from), b = channels(to);
  return `#${a.map((c, i) => Math.round(c + (b[i] - c) * share).toString(16).padStart(2, "0")).join("")}`;
}

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}
