//! The words of a line as numbers, times, names and addresses. [pure]

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::Name;

use super::syntax::Line;
use super::{CorefileError, keys};

/// Longer times are a slip.
const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 3600);

impl Line {
    pub(super) fn name(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    pub(super) fn args(&self) -> &[String] {
        self.words.get(1..).unwrap_or_default()
    }

    pub(super) fn body(&self) -> &[Line] {
        self.body.as_deref().unwrap_or_default()
    }

    pub(super) fn error(&self, what: impl Into<String>) -> CorefileError {
        self.place.error(what)
    }

    /// For options: braces of their own mean nothing.
    pub(super) fn unknown_option(&self, directive: &str, known: &[&str]) -> CorefileError {
        let known = known.join(", ");
        self.error(format!(
            "{directive} has no option {} here; it has {known}",
            self.name()
        ))
    }

    pub(super) fn without_body(&self) -> Result<(), CorefileError> {
        match &self.body {
            Some(_) => Err(self.error(format!("{} takes no braces", self.name()))),
            None => Ok(()),
        }
    }

    /// No words after the first one.
    pub(super) fn bare(&self) -> Result<(), CorefileError> {
        match self.args() {
            [] => Ok(()),
            _ => Err(self.error(format!("{} takes no argument here", self.name()))),
        }
    }

    /// The only argument.
    pub(super) fn one(&self) -> Result<&str, CorefileError> {
        match self.args() {
            [only] => Ok(only),
            _ => Err(self.error(format!("{} takes one argument", self.name()))),
        }
    }

    /// At most one argument.
    pub(super) fn at_most_one(&self) -> Result<Option<&str>, CorefileError> {
        match self.args() {
            [] => Ok(None),
            [only] => Ok(Some(only)),
            _ => Err(self.error(format!("{} takes one argument at most", self.name()))),
        }
    }

    pub(super) fn number<T: FromStr>(&self, text: &str) -> Result<T, CorefileError> {
        text.parse()
            .map_err(|_| self.error(format!("{}: {text:?} is no fitting number", self.name())))
    }

    pub(super) fn duration(&self, text: &str) -> Result<Duration, CorefileError> {
        duration(text).ok_or_else(|| {
            self.error(format!(
                "{}: {text:?} is no time of at most a year, as 500ms, 5s or 1h30m are",
                self.name()
            ))
        })
    }

    /// Names, and networks as the reverse zones that make them up.
    pub(super) fn zones(&self, texts: &[String]) -> Result<Vec<Name>, CorefileError> {
        let mut zones = Vec::new();
        for text in texts {
            zones.extend(keys::zones(text).map_err(|why| self.error(why))?);
        }
        Ok(zones)
    }

    pub(super) fn rcode(&self, text: &str) -> Result<ResponseCode, CorefileError> {
        Ok(match text.to_ascii_uppercase().as_str() {
            "NOERROR" => ResponseCode::NoError,
            "FORMERR" => ResponseCode::FormErr,
            "SERVFAIL" => ResponseCode::ServFail,
            "NXDOMAIN" => ResponseCode::NXDomain,
            "NOTIMP" => ResponseCode::NotImp,
            "REFUSED" => ResponseCode::Refused,
            _ => return Err(self.error(format!("{text} is no response code known here"))),
        })
    }

    /// ADDRESS:PORT, or :PORT for all addresses.
    pub(super) fn listener(&self, text: &str) -> Result<SocketAddr, CorefileError> {
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        let any = IpAddr::from([0u16; 8]);
        let host = match host.trim_start_matches('[').trim_end_matches(']') {
            "" => Some(any),
            "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
            host => host.parse().ok(),
        };
        match (host, port.parse()) {
            (Some(host), Ok(port)) => Ok(SocketAddr::new(host, port)),
            _ => Err(self.error(format!(
                "{}: {text:?} is not an address and a port, as :8080 or 127.0.0.1:8080 are",
                self.name()
            ))),
        }
    }
}

/// Times as Go writes them: 1h30m, 0.5s, 500ms. Zero needs no unit.
fn duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = 0.0;
    let mut rest = text;
    while !rest.is_empty() {
        let unit_at = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(unit_at);
        let end = after
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(after.len());
        let (unit, next) = after.split_at(end);
        let seconds = match unit {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        total += number.parse::<f64>().ok()? * seconds;
        rest = next;
    }
    let found = Duration::try_from_secs_f64(total).ok()?;
    (!text.is_empty() && found <= MAX_DURATION).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, wanted_ms) in [
            ("5s", 5000),
            ("500ms", 500),
            ("0.5s", 500),
            ("1h30m", 5_400_000),
            ("0", 0),
        ] {
            assert_eq!(
                duration(text),
                Some(Duration::from_millis(wanted_ms)),
                "{text}"
            );
        }
        for bad in ["", "5", "s", "-1s", "1.2.3s", "1d", "99999999h", "5s3"] {
            assert_eq!(duration(bad), None, "{bad}");
        }
    }
}
