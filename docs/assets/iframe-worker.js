// A browser starts no worker on file://, and the site's search is one: there, an iframe takes its place.
// (Material's own shim for this is fetched from a CDN; this site makes no request.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      inside.postMessage = (data) => this.hear(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce((done, each) => done.then(() => this.load(each)), Promise.resolve());
      this.loaded = this.load(url);
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: new URL(url, document.baseURI).href, onload: resolve, onerror: reject });
        this.inside.document.body.append(script);
      });
    }
    hear(event) {
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement?.remove();
    }
  };
}
