//! What Google's Vertex AI tells a container that is to serve predictions: variables of the environment, read as llama-server reads
//! them.

use std::ffi::OsString;

use anyhow::{Result, bail};

/// Where predictions and health are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vertex {
    pub port: u16,
    /// Beside `/health`.
    pub health: Option<String>,
    pub predict: String,
}

impl Vertex {
    /// `None` unless the mode is that of predictions.
    ///
    /// # Errors
    /// A port that is none, a path that is none.
    pub fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>> {
        let value = |name: &str| -> Result<Option<String>> {
            match variable(name).map(OsString::into_string).transpose() {
                Ok(value) => Ok(value.filter(|value| !value.is_empty())),
                Err(_) => bail!("{name} is no text"),
            }
        };
        if value("AIP_MODE")?.as_deref() != Some("PREDICTION") {
            return Ok(None);
        }
        let path = |name: &str| -> Result<Option<String>> {
            let Some(path) = value(name)? else { return Ok(None) };
            // Braces would be the router's own.
            if path.contains(['{', '}', '?', '#']) || path.contains(char::is_whitespace) {
                bail!("{name}={path}: this is no path");
            }
            Ok(Some(if path.starts_with('/') { path } else { format!("/{path}") }))
        };
        let port = value("AIP_HTTP_PORT")?.unwrap_or_else(|| "8080".to_owned());
        let Ok(port) = port.parse() else { bail!("AIP_HTTP_PORT={port}: this is no port") };
        let predict = path("AIP_PREDICT_ROUTE")?.unwrap_or_else(|| "/predict".to_owned());
        let health = path("AIP_HEALTH_ROUTE")?;
        if health.as_ref() == Some(&predict) {
            bail!("AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE are both {predict}");
        }
        Ok(Some(Self { port, health, predict }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &[(&str, &str)]) -> Result<Option<Vertex>, String> {
        let find = |name: &str| set.iter().find(|(own, _)| *own == name).map(|(_, value)| OsString::from(value));
        Vertex::read(find).map_err(|error| error.to_string())
    }

    #[test]
    fn only_predictions_count() {
        assert_eq!(read(&[("AIP_HTTP_PORT", "1")]), Ok(None));
        assert_eq!(read(&[("AIP_MODE", "TRAINING"), ("AIP_HTTP_PORT", "x")]), Ok(None));
        let plain = Vertex { port: 8080, health: None, predict: "/predict".to_owned() };
        assert_eq!(read(&[("AIP_MODE", "PREDICTION"), ("AIP_HEALTH_ROUTE", "")]), Ok(Some(plain)));
    }

    #[test]
    fn paths_and_ports() {
        let with = |name, value| read(&[("AIP_MODE", "PREDICTION"), (name, value)]);
        let predict = |value| with("AIP_PREDICT_ROUTE", value).map(|own| own.unwrap().predict);
        assert_eq!(predict("ask"), Ok("/ask".to_owned()));
        let deployed = "/v1/endpoints/1/deployedModels/2:predict";
        assert_eq!(predict(deployed), Ok(deployed.to_owned()));
        assert_eq!(predict("/{all}"), Err("AIP_PREDICT_ROUTE=/{all}: this is no path".to_owned()));
        assert_eq!(with("AIP_HEALTH_ROUTE", "up").unwrap().unwrap().health.as_deref(), Some("/up"));
        assert!(with("AIP_HEALTH_ROUTE", "predict").unwrap_err().contains("both /predict"));
        assert_eq!(with("AIP_HTTP_PORT", "7").unwrap().unwrap().port, 7);
        assert!(with("AIP_HTTP_PORT", "70000").unwrap_err().contains("no port"));
    }
}
