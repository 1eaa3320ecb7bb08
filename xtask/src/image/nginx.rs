//! The nginx image: Debian's nginx with its libraries, laid out like the image that people know.

use anyhow::Result;

use super::deb::{Packages, is_library};
use super::oci::{Config, Image, Layer};
use super::tools::{add_busybox, base_files};

const CONFIG: &str = "\
user www-data;
worker_processes 1;
pid /run/nginx.pid;
error_log /var/log/nginx/error.log notice;
events { worker_connections 1024; }
http {
    include /etc/nginx/mime.types;
    default_type application/octet-stream;
    log_format main '$remote_addr - $remote_user [$time_local] \"$request\" $status $body_bytes_sent \"$http_user_agent\"';
    access_log /var/log/nginx/access.log main;
    sendfile on;
    keepalive_timeout 65;
    server_tokens off;
    include /etc/nginx/conf.d/*.conf;
}
";

const SERVER: &str = "\
server {
    listen 80 default_server;
    listen [::]:80 default_server;
    root /usr/share/nginx/html;
    index index.html;
    # The page and this header tell which pod answered.
    add_header X-Served-By $hostname always;
    ssi on;
}
";

const PAGE: &str = "\
<!DOCTYPE html>
<html>
<head><title>Welcome to nginx!</title></head>
<body>
<h1>Welcome to nginx!</h1>
<p>Served by <!--# echo var=\"hostname\" -->, a pod of a Weir cluster.</p>
</body>
</html>
";

/// A shell and the few tools that people reach for inside a container.
const APPLETS: [&str; 12] = [
    "sh", "ls", "cat", "ps", "nslookup", "nc", "sleep", "env", "hostname", "ip", "grep", "timeout",
];

pub(super) fn image(packages: &Packages) -> Result<Image> {
    let libraries = packages.dependencies("nginx", &["lib", "zlib"])?;
    let mut names = vec!["nginx", "nginx-common"];
    names.extend(libraries.iter().map(String::as_str));
    let files = packages.files(&names, |path| {
        path == "usr/sbin/nginx" || path == "etc/nginx/mime.types" || is_library(path)
    })?;
    let mut layer = Layer::new();
    files.add_to(&mut layer)?;
    layer.file("etc/nginx/nginx.conf", CONFIG.as_bytes(), 0o644)?;
    layer.file("etc/nginx/conf.d/default.conf", SERVER.as_bytes(), 0o644)?;
    layer.file("usr/share/nginx/html/index.html", PAGE.as_bytes(), 0o644)?;
    layer.folder("var/lib/nginx", 0o755)?;
    layer.symlink("var/log/nginx/access.log", "/dev/stdout")?;
    layer.symlink("var/log/nginx/error.log", "/dev/stderr")?;
    add_busybox(packages, &mut layer, |applet| APPLETS.contains(&applet))?;
    base_files(&mut layer)?;
    Ok(Image {
        name: "docker.io/library/nginx:latest".into(),
        layer,
        config: Config {
            cmd: ["nginx", "-g", "daemon off;"].map(String::from).into(),
            exposed_ports: vec!["80/tcp"],
            stop_signal: Some("SIGQUIT"),
            ..Config::default()
        },
    })
}
